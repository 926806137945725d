{{/* Rejects values that permit other clients than gateways to choose workers over gRPC. */}}
{{- define "kvatlas.checkGRPC" -}}
{{- $grpc := .Values.grpc }}
{{- if and (or $grpc.insecure $grpc.clientCASecret) (not $grpc.enabled) }}
{{- fail "grpc.insecure and grpc.clientCASecret need grpc.enabled" }}
{{- end }}
{{- if and $grpc.clientCASecret (not .Values.http.tlsSecret) }}
{{- fail "grpc.clientCASecret needs http.tlsSecret: client certificates are part of TLS" }}
{{- end }}
{{- if $grpc.insecure }}
{{- if not .Values.networkPolicy.enabled }}
{{- fail "grpc.insecure needs networkPolicy.enabled: without a policy, every pod can choose workers" }}
{{- end }}
{{- range .Values.networkPolicy.grpcFrom }}
{{- if not (or .podSelector .ipBlock) }}
{{- fail "grpc.insecure needs a podSelector or an ipBlock in every peer of networkPolicy.grpcFrom: a namespaceSelector alone admits all pods of the namespace" }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
