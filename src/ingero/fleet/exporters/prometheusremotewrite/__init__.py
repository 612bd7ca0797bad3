"""``prometheusremotewrite``: metrics into a Prometheus, Mimir, Thanos or VictoriaMetrics that takes remote writes."""
