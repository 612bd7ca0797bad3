{{- define "ingero.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "ingero.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else if contains (include "ingero.name" .) .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "ingero.name" .) | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "ingero.selector" -}}
app.kubernetes.io/name: {{ include "ingero.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "ingero.labels" -}}
{{ include "ingero.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "ingero.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "ingero.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "ingero.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- /* Ports that the agent sends to: those of the values, and in mode fleet-push of its Fleets and of their threshold; separated
by spaces. An address without a port has that of its scheme. */ -}}
{{- define "ingero.fleetPorts" -}}
{{- $push := .Values.fleetPush -}}
{{- $ports := list -}}
{{- range .Values.networkPolicy.fleetPorts -}}{{- $ports = append $ports (toString (int .)) -}}{{- end -}}
{{- if eq .Values.mode "fleet-push" -}}
{{- $scheme := ternary "http" "https" (and $push.insecure (not $push.tls.secretName)) -}}
{{- range append (splitList "," ($push.endpoint | default "")) ($push.thresholdUrl | default "") -}}
{{- $address := trim . -}}
{{- if $address -}}
{{- if not (contains "://" $address) -}}{{- $address = printf "%s://%s" $scheme $address -}}{{- end -}}
{{- $authority := regexReplaceAll "^[a-z]+://([^/]*).*$" $address "${1}" -}}
{{- $ports = append $ports (regexFind ":[0-9]+$" $authority | trimPrefix ":" | default (ternary "80" "443" (hasPrefix "http://" $address))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $ports | uniq | join " " -}}
{{- end -}}
