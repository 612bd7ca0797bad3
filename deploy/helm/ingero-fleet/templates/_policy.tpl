{{- /* The remediator's policy: the values' one, with where things are in this pod. The addresses are the chart's own, as its
probe, ports, service and network policy name them. */ -}}
{{- define "ingero-fleet.policy" -}}
{{- $v := .Values.remediator -}}
{{- if gt (int .Values.replicaCount) 1 -}}
{{- fail "remediator.enabled needs replicaCount=1: each remediator would act by what its own Fleet judges" -}}
{{- end -}}
{{- if not $v.policy.action -}}
{{- fail "remediator.policy.action is needed: kubernetes, kubernetes_device, nvsentinel, webhook or command" -}}
{{- end -}}
{{- if and (ne (toString ($v.policy.mode | default "dry-run")) "dry-run") (not $v.journalClaim) -}}
{{- fail "remediator.journalClaim is needed unless remediator.policy.mode is dry-run: a new pod would not know which nodes are out of service" -}}
{{- end -}}
{{- $given := dict -}}
{{- range $key, $section := $v.policy -}}{{- if not (kindIs "invalid" $section) -}}{{- $_ := set $given $key $section -}}{{- end -}}{{- end -}}
{{- $policy := mergeOverwrite (dict "brakes" (dict "stop_file" "/var/lib/ingero-remediator/stop") "journal" (dict "file" "/var/lib/ingero-remediator/journal.db")) (deepCopy $given) (dict "listen" (include "ingero-fleet.listen" (list $v.policy.listen 9467))) -}}
{{- range $key, $file := dict "journal.file" $policy.journal.file "brakes.stop_file" $policy.brakes.stop_file -}}
{{- if and (not (kindIs "invalid" $file)) (not (hasPrefix "/var/lib/ingero-remediator/" (toString $file))) -}}
{{- fail (printf "remediator.policy.%s must be below /var/lib/ingero-remediator: nothing else in the container is written to and stays" $key) -}}
{{- end -}}
{{- end -}}
{{- if and (hasKey $policy.action "webhook") (not $v.webhookSecret.name) (not ($policy.action.webhook).secret_file) -}}
{{- fail "remediator.webhookSecret.name is needed for policy.action.webhook: its key signs the requests" -}}
{{- end -}}
{{- if and $v.webhookSecret.name (hasKey $policy.action "webhook") -}}
{{- $_ := set $policy.action.webhook "secret_file" (printf "/etc/ingero/webhook/%s" $v.webhookSecret.key) -}}
{{- end -}}
{{- if include "ingero-fleet.asksPeople" . -}}
{{- if not $v.approvalSecret.name -}}
{{- fail "remediator.approvalSecret.name is needed for policy.approval.link: its key signs the links" -}}
{{- end -}}
{{- $_ := set $policy.approval "link" (mergeOverwrite $policy.approval.link (dict "listen" (include "ingero-fleet.listen" (list $policy.approval.link.listen 9468)) "key_file" (printf "/etc/ingero/approval/%s" $v.approvalSecret.key))) -}}
{{- end -}}
{{- if include "ingero-fleet.tellsNvsentinel" . -}}
{{- $where := dict "socket" "/var/run/nvsentinel/nvsentinel.sock" "token_file" "/var/run/secrets/nvsentinel/platform-connector/token" -}}
{{- $_ := set $policy.action "nvsentinel" (mergeOverwrite $where ($policy.action.nvsentinel | default dict)) -}}
{{- end -}}
{{- $echo := .Values.echo -}}
{{- $audit := $policy.audit | default dict -}}
{{- if and $echo.endpoint (not $audit.endpoint) -}}
{{- $there := dict "endpoint" $echo.endpoint "bearer_file" (printf "/etc/ingero/echo-token/%s" $echo.tokenSecret.key) -}}
{{- if $echo.caSecret.name -}}{{- $_ := set $there "ca_file" (printf "/etc/ingero/echo-ca/%s" $echo.caSecret.key) -}}{{- end -}}
{{- $_ := set $policy "audit" (mergeOverwrite $there $audit) -}}
{{- end -}}
{{- toYaml $policy -}}
{{- end -}}

{{- /* Where a page listens, by what the policy says and the container's port: every address of the pod, IPv6's if it says so. */ -}}
{{- define "ingero-fleet.listen" -}}
{{- $six := printf "[::]:%d" (index . 1) -}}
{{- ternary $six (printf "0.0.0.0:%d" (index . 1)) (eq (toString (index . 0)) $six) -}}
{{- end -}}

{{- /* Ports that the remediator sends to: its webhook, receivers of links and the audit; separated by spaces. */ -}}
{{- define "ingero-fleet.remediatorPorts" -}}
{{- if .Values.remediator.enabled -}}
{{- $policy := include "ingero-fleet.policy" . | fromYaml -}}
{{- $urls := list (($policy.action.webhook).url | default "") (($policy.audit).endpoint | default "") -}}
{{- range (($policy.approval).link).send -}}
{{- $urls = append $urls (dig "webhook" "url" "" .) -}}
{{- if hasKey . "slack" -}}{{- $urls = append $urls "https://hooks.slack.com" -}}{{- end -}}
{{- end -}}
{{- $ports := list -}}
{{- range without $urls "" -}}{{- $ports = append $ports (include "ingero-fleet.port" .) -}}{{- end -}}
{{- $ports | uniq | sortAlpha | join " " -}}
{{- end -}}
{{- end -}}

{{- /* Whether the remediator asks this cluster's API server. */ -}}
{{- define "ingero-fleet.asksKubernetes" -}}
{{- $action := .Values.remediator.policy.action | default dict -}}
{{- if and .Values.remediator.enabled (or (hasKey $action "kubernetes") (hasKey $action "kubernetes_device")) -}}true{{- end -}}
{{- end -}}

{{- /* Whether the remediator tells NVSentinel, over the socket of its node. */ -}}
{{- define "ingero-fleet.tellsNvsentinel" -}}
{{- if and .Values.remediator.enabled (hasKey (.Values.remediator.policy.action | default dict) "nvsentinel") -}}true{{- end -}}
{{- end -}}

{{- /* Whether proposals have links, and so a page that is reached from outside. */ -}}
{{- define "ingero-fleet.asksPeople" -}}
{{- if and .Values.remediator.enabled (.Values.remediator.policy.approval).link -}}true{{- end -}}
{{- end -}}
