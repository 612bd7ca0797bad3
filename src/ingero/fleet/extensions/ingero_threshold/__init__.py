"""The ``ingero_threshold`` extension: tells thresholds, on answers to pushes and to who asks, and shows admin pages.

Computes nothing and knows no component: thresholds come from whoever offers a `ThresholdSource`, pages from whoever
offers `AdminRoutes`, both looked up when they are needed because their owners start later.
"""
