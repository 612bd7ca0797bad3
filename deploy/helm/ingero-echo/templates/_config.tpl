{{- define "ingero-echo.tlsSecret" -}}
{{- .Values.tls.secretName | default (printf "%s-tls" (include "ingero-echo.fullname" .)) -}}
{{- end -}}

{{- /* echo.yaml: the chart's, with what the values say. The addresses are the chart's own, as its probes, ports and service name
them: every one of the pod, IPv6's if the values say so. */ -}}
{{- define "ingero-echo.config" -}}
{{- $given := .Values.config -}}
{{- if not (or (regexMatch "^(/var/lib/ingero-echo/.+)?$" ($given.db | default "")) $given.store $given.replica_of) -}}
{{- fail "config.db must be below /var/lib/ingero-echo: rows elsewhere would go with the pod" -}}
{{- end -}}
{{- $config := dict
  "db" "/var/lib/ingero-echo/echo.db"
  "tls_cert" "/etc/ingero/tls/tls.crt"
  "tls_key" "/etc/ingero/tls/tls.key" -}}
{{- if .Values.auth.aclKey -}}
{{- $_ := set $config "bearer_acl_file" (printf "/etc/ingero/auth/%s" .Values.auth.aclKey) -}}
{{- else -}}
{{- $_ := set $config "auth_token_file" (printf "/etc/ingero/auth/%s" .Values.auth.key) -}}
{{- end -}}
{{- if and .Values.backups.existingClaim (not $given.replica_of) -}}
{{- $_ := set $config "backup_dir" "/var/lib/ingero-echo-backups" -}}
{{- end -}}
{{- $addresses := dict -}}
{{- range $key, $port := dict "otlp_addr" 4317 "otlp_http_addr" 4318 "mcp_addr" 8081 "health_addr" 8080 -}}
{{- $six := printf "[::]:%d" $port -}}
{{- $_ := set $addresses $key (ternary $six (printf "0.0.0.0:%d" $port) (eq (toString (get $given $key)) $six)) -}}
{{- end -}}
{{- toYaml (mergeOverwrite $config (deepCopy $given) $addresses) -}}
{{- end -}}
