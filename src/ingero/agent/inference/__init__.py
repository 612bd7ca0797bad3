"""Programs that serve a model, while they are traced: their steps, outliers with causes, and their own metrics."""
