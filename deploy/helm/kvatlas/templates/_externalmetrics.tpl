{{/* Refuses values with which no API server could read the metrics. */}}
{{- define "kvatlas.checkExternalMetrics" -}}
{{- $metrics := .Values.externalMetrics }}
{{- if $metrics.enabled }}
{{- if not .Values.http.tlsSecret }}
{{- fail "externalMetrics.enabled needs http.tlsSecret: an API server connects over TLS" }}
{{- end }}
{{- if not (or $metrics.caBundle $metrics.annotations) }}
{{- fail "externalMetrics.caBundle is empty: give the authority of http.tlsSecret, or externalMetrics.annotations for cert-manager" }}
{{- end }}
{{- if and .Values.grpc.enabled (eq (int .Values.grpc.port) (int $metrics.port)) }}
{{- fail "externalMetrics.port is the port of gRPC" }}
{{- end }}
{{- end }}
{{- end }}
