{{- /* Fleet's configuration: the shipped one, with what the values say, and config.overrides over all. */ -}}
{{- define "ingero-fleet.config" -}}
{{- $v := .Values -}}
{{- $door := dict -}}
{{- if $v.tls.secretName -}}
{{- $tls := dict "cert_file" "/etc/ingero/tls/tls.crt" "key_file" "/etc/ingero/tls/tls.key" -}}
{{- if $v.tls.clientCa -}}{{- $_ := set $tls "client_ca_file" "/etc/ingero/tls/ca.crt" -}}{{- end -}}
{{- $_ := set $door "tls" $tls -}}
{{- end -}}
{{- if $v.auth.secretName -}}{{- $_ := set $door "auth" (dict "authenticator" "bearertokenauth") -}}{{- end -}}
{{- $extensions := list "ingero_threshold" "health_check" "zpages" -}}
{{- $exporters := dict "prometheus" (dict "endpoint" "0.0.0.0:9090") -}}
{{- $last := "debug" -}}
{{- if $v.echo.endpoint -}}
{{- $last = "otlphttp" -}}
{{- $echo := dict "endpoint" $v.echo.endpoint "headers" (dict "Authorization" "Bearer ${env:ECHO_TOKEN}") -}}
{{- if $v.echo.caSecret.name -}}{{- $_ := set $echo "tls" (dict "ca_file" (printf "/etc/ingero/echo-ca/%s" $v.echo.caSecret.key)) -}}{{- end -}}
{{- $_ := set $exporters "otlphttp" $echo -}}
{{- else -}}
{{- $_ := set $exporters "debug" (dict "verbosity" "basic" "sampling_initial" 1 "sampling_thereafter" 0) -}}
{{- end -}}
{{- $known := dict
  "ingero_threshold" (merge (dict "agent_endpoint" "0.0.0.0:8080" "admin_endpoint" "127.0.0.1:8081") dict)
  "health_check" (dict "endpoint" "0.0.0.0:13133")
  "zpages" (dict "endpoint" "127.0.0.1:55679") -}}
{{- if $v.auth.secretName -}}
{{- $_ := set $known "bearertokenauth" (dict "filename" "/etc/ingero/auth/tokens") -}}
{{- $extensions = append $extensions "bearertokenauth" -}}
{{- end -}}
{{- $nccl := dict "reorder_window" "1s" "judge_interval" "250ms" -}}
{{- if $v.config.rates -}}{{- $_ := set $nccl "rates" $v.config.rates -}}{{- end -}}
{{- $metrics := ternary (list "prometheus" "otlphttp") (list "prometheus") (eq $last "otlphttp") -}}
{{- $processors := list "memory_limiter" "ingero" "nccl" -}}
{{- $config := dict
  "receivers" (dict "otlp" (dict "protocols" (dict
    "grpc" (merge (dict "endpoint" "0.0.0.0:4317") $door)
    "http" (merge (dict "endpoint" "0.0.0.0:4318") $door))))
  "processors" (dict
    "memory_limiter" (dict "check_interval" "1s" "limit_percentage" 80)
    "ingero" (dict "threshold" $v.config.threshold "quorum" $v.config.quorum "push_interval" $v.config.push_interval
      "max_expected_nodes" (int $v.config.max_expected_nodes))
    "nccl" $nccl)
  "exporters" $exporters
  "extensions" $known
  "service" (dict "extensions" $extensions
    "telemetry" (dict "metrics" (dict "address" "0.0.0.0:8888"))
    "pipelines" (dict
      "metrics" (dict "receivers" (list "otlp") "processors" $processors "exporters" $metrics)
      "logs" (dict "receivers" (list "otlp") "processors" $processors "exporters" (list $last)))) -}}
{{- toYaml (mergeOverwrite $config (deepCopy $v.config.overrides)) -}}
{{- end -}}
