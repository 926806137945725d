{{/* Rejects values without a way for API servers to read the metrics. */}}
{{- define "kvatlas.checkExternalMetrics" -}}
{{- $metrics := .Values.externalMetrics }}
{{- if $metrics.enabled }}
{{- if not .Values.http.tlsSecret }}
{{- fail "externalMetrics.enabled needs http.tlsSecret: API servers connect over TLS" }}
{{- end }}
{{- if not (or $metrics.caBundle $metrics.annotations) }}
{{- fail "externalMetrics.caBundle is empty: set the authority of http.tlsSecret there, or set externalMetrics.annotations for cert-manager" }}
{{- end }}
{{- if and .Values.grpc.enabled (eq (int .Values.grpc.port) (int $metrics.port)) }}
{{- fail "externalMetrics.port is also the port of gRPC: choose another port" }}
{{- end }}
{{- end }}
{{- end }}
