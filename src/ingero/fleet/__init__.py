"""The cluster's collector: receivers → processors → exporters, plus extensions, wired from one YAML file."""
