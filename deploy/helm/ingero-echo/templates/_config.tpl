{{- define "ingero-echo.tlsSecret" -}}
{{- .Values.tls.secretName | default (printf "%s-tls" (include "ingero-echo.fullname" .)) -}}
{{- end -}}

{{- define "ingero-echo.config" -}}
{{- $config := dict
  "otlp_addr" "0.0.0.0:4317"
  "otlp_http_addr" "0.0.0.0:4318"
  "mcp_addr" "0.0.0.0:8081"
  "health_addr" "0.0.0.0:8080"
  "db" "/var/lib/ingero-echo/echo.db"
  "tls_cert" "/etc/ingero/tls/tls.crt"
  "tls_key" "/etc/ingero/tls/tls.key" -}}
{{- if .Values.auth.aclKey -}}
{{- $_ := set $config "bearer_acl_file" (printf "/etc/ingero/auth/%s" .Values.auth.aclKey) -}}
{{- else -}}
{{- $_ := set $config "auth_token_file" (printf "/etc/ingero/auth/%s" .Values.auth.key) -}}
{{- end -}}
{{- if .Values.backups.existingClaim -}}
{{- $_ := set $config "backup_dir" "/var/lib/ingero-echo-backups" -}}
{{- end -}}
{{- toYaml (mergeOverwrite $config (deepCopy .Values.config)) -}}
{{- end -}}
