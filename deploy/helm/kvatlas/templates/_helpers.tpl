{{/* Prefix of all names: the name of the release, with kvatlas in the name. */}}
{{- define "kvatlas.fullname" -}}
{{- if contains "kvatlas" .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-kvatlas" .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{/* Labels of an object. The arguments are the context and the name of the component. */}}
{{- define "kvatlas.labels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/part-of: kvatlas
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end -}}

{{/* URL of NATS for clients. */}}
{{- define "kvatlas.natsURL" -}}
{{- if eq .Values.nats.mode "external" -}}{{ required "nats.mode external needs nats.url" .Values.nats.url }}
{{- else if eq .Values.nats.mode "embedded" -}}nats://{{ include "kvatlas.fullname" . }}-indexer-nodes:4222
{{- else -}}nats://{{ include "kvatlas.fullname" . }}-nats:4222
{{- end -}}
{{- end -}}

{{- define "kvatlas.image" -}}
image: {{ printf "%s:%s" .Values.image.repository .Values.image.tag | quote }}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end -}}

{{- define "kvatlas.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kvatlas.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: ["ALL"]}
{{- end -}}

{{/* Egress rules of a NetworkPolicy: DNS. */}}
{{- define "kvatlas.egressToDNS" -}}
- to: # DNS
    {{- toYaml .Values.networkPolicy.dns | nindent 4 }}
  ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end -}}

{{/* Egress rules of a NetworkPolicy: NATS servers. The mode embedded has no rule. */}}
{{- define "kvatlas.egressToNATS" -}}
{{- if eq .Values.nats.mode "cluster" -}}
- to:
    - podSelector:
        matchLabels: {app.kubernetes.io/name: {{ include "kvatlas.fullname" . }}-nats}
  ports:
    - {port: 4222, protocol: TCP}
{{- else if eq .Values.nats.mode "external" -}}
- to: # external NATS servers
    {{- toYaml .Values.networkPolicy.externalNATS | nindent 4 }}
  ports:
    {{- $ports := list }}
    {{- range splitList "," .Values.nats.url }}
    {{- $ports = append $ports (regexFind "[0-9]+$" (regexFind ":[0-9]+$" .) | default "4222") }}
    {{- end }}
    {{- range $ports | uniq }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end -}}
{{- end -}}

{{/*
The shim of an engine, as a native sidecar in the pod of the engine. The arguments are the context of the chart and the
settings.

  initContainers:
    - {{- include "kvatlas.shim" (list . (dict "model" "llama" "blockSize" 16 "nkeySecret" "kvatlas-shims"
          "servingEndpoint" "http://$(POD_IP):8000" "extraArgs" (list "--ranks=2"))) | nindent 6 }}
      restartPolicy: Always

Further settings are endpoint (of the engine's events), replay (of the engine's replays), and pool (the name of the key
pool). The pod needs the label kvatlas.io/client: "true". With nkeySecret, the pod also needs the volume `keys`. The
container mounts a single file of the volume: POD.nk, or POOL.nk.
*/}}
{{- define "kvatlas.shim" -}}
{{- $root := index . 0 -}}
{{- $engine := index . 1 -}}
name: shim
{{ include "kvatlas.image" $root }}
command: [/worker-shim]
args:
  - run
  - --engine={{ $engine.endpoint | default "tcp://127.0.0.1:5557" }}
  - --replay={{ $engine.replay | default "tcp://127.0.0.1:5657" }}
  - --worker=$(POD_NAME)
  - --model={{ $engine.model }}
  - --block-size={{ $engine.blockSize }}
  {{- with $engine.servingEndpoint }}
  - {{ printf "--serving-endpoint=%s" . | quote }}
  {{- end }}
  - --nats={{ include "kvatlas.natsURL" $root }}
  {{- if $engine.nkeySecret }}
  - --nats-nkey=/etc/kvatlas/shim.nk
  - --nats-inbox-prefix=_INBOX_{{ with $engine.pool }}pool-{{ . }}{{ else }}shim-$(POD_NAME){{ end }}
  {{- end }}
  {{- if and $root.Values.nats.caSecret (eq $root.Values.nats.mode "external") }}
  - --nats-ca=/etc/kvatlas/nats-ca/ca.crt
  {{- end }}
  {{- if ne $root.Values.namespace "default" }}
  - --namespace={{ $root.Values.namespace }}
  {{- end }}
  - --log-format=json
  {{- range $engine.extraArgs }}
  - {{ . | quote }}
  {{- end }}
env:
  - name: POD_NAME
    valueFrom:
      fieldRef: {fieldPath: metadata.name}
  - name: POD_IP
    valueFrom:
      fieldRef: {fieldPath: status.podIP}
resources:
  requests: {cpu: 100m, memory: 128Mi}
  limits: {memory: 512Mi}
securityContext:
  {{- include "kvatlas.containerSecurity" . | nindent 2 }}
{{- $ca := and $root.Values.nats.caSecret (eq $root.Values.nats.mode "external") }}
{{- if or $engine.nkeySecret $ca }}
volumeMounts:
  {{- if $engine.nkeySecret }}
  # a single file of the secret: the key of the pod{{ with $engine.pool }}'s pool{{ end }}
  - {name: keys, mountPath: /etc/kvatlas/shim.nk, subPathExpr: {{ $engine.pool | default "$(POD_NAME)" }}.nk, readOnly: true}
  {{- end }}
  {{- if $ca }}
  - {name: nats-ca, mountPath: /etc/kvatlas/nats-ca, readOnly: true}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "kvatlas.claim" -}}
accessModes: [ReadWriteOnce]
{{- with .Values.nats.storage.className }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests: {storage: {{ .Values.nats.storage.size }}}
{{- end -}}
