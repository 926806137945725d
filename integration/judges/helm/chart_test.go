package helm

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
)

const (
	root     = "../../.."
	chartDir = root + "/deploy/helm/kvatlas"
)

var update = flag.Bool("update", false, "write the renderings in testdata")

// The values of the other tests. Further tests check the values with a file in testdata.
var renderings = map[string]string{
	"default": "",
	"default, with an engine": `
engineExample: {enabled: true}
`,
	"embedded": `
nats: {storage: {className: fast}}
`,
	"everything": `
image: {pullPolicy: IfNotPresent, tag: v0.4.0}
imagePullSecrets: [{name: registry}]
namespace: prod
indexer:
  replicas: 5
  partitionReplicas: 3
  drainTimeout: 60
  extraArgs: [--policy=least_load, --metrics-workers=100]
  extraVolumes: [{name: engine-token, secret: {secretName: my-engine-token, defaultMode: 0440}}]
  extraVolumeMounts: [{name: engine-token, mountPath: /etc/engine-token, readOnly: true}]
  resources: {requests: {cpu: 500m}, limits: {memory: 8Gi}}
  nodeSelector: {disk: fast}
  tolerations: [{key: gpu, operator: Exists}]
  podAnnotations: {a: b}
  podDisruptionBudget: {maxUnavailable: 40%}
http: {tokenSecret: my-token, tlsSecret: my-tls}
grpc: {enabled: true, port: 9003, clientCASecret: my-gateways}
externalMetrics:
  enabled: true
  port: 6444
  clientCASecret: my-front-proxy
  clientNames: [front-proxy-client, aggregator]
  caBundle: Y2E=
  annotations: {a: b}
nats: {mode: external, url: "tls://nats-1:4222,tls://nats-2:4222", caSecret: nats-ca, nkeySecret: my-key}
serviceMonitor: {enabled: true, interval: 30s, labels: {release: prometheus}, caSecret: my-ca, shims: true,
  tokenSecret: my-read-token}
tokenizers: {models: {llama: {engines: tokenize}}}
engineExample:
  enabled: true
  replicas: 1
  model: llama
  blockSize: 64
  nkeySecret: my-pool
  pool: llama
  servingEndpoint: http://$(POD_IP):8000
  extraArgs: [--ranks=2, --taint=spot]
networkPolicy:
  httpFrom: [{namespaceSelector: {matchLabels: {team: routing}}}]
  enginePorts: [5557, 30000]
  extraEgress: [{to: [{podSelector: {matchLabels: {app: collector}}}], ports: [{port: 4318}]}]
`,
	"gateways without tokens": `
grpc: {enabled: true, insecure: true}
networkPolicy:
  grpcFrom:
    - namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: gateway-system}}
      podSelector: {matchLabels: {gateway.networking.k8s.io/gateway-name: inference}}
`,
	"no keys": `
nats: {mode: external, url: "nats://nats", nkeySecret: ""}
engineExample: {enabled: true, nkeySecret: ""}
`,
}

// TestLint runs Helm's linter on the chart with all values. The only permitted finding is the missing icon.
func TestLint(t *testing.T) {
	for name, text := range allRenderings(t) {
		l := lint.AllWithKubeVersion(chartDir, parseValues(t, text), "inference",
			&chartutil.KubeVersion{Version: "v1.37.0", Major: "1", Minor: "37"})
		for _, m := range l.Messages {
			if !strings.Contains(m.Err.Error(), "icon is recommended") {
				t.Errorf("%s: %v", name, m)
			}
		}
	}
}

// TestClusterIsTheManifests checks that the chart with values-cluster.yaml is equal to deploy/kubernetes, except for
// two labels with the chart's name.
func TestClusterIsTheManifests(t *testing.T) {
	var all strings.Builder
	for _, file := range []string{"nats.yaml", "indexer.yaml", "network.yaml", "engine-example.yaml"} {
		text, err := os.ReadFile(filepath.Join(root, "deploy/kubernetes", file))
		if err != nil {
			t.Fatal(err)
		}
		all.WriteString("---\n" + string(text))
	}
	want := objects(t, all.String())
	_, is := rendered(t, clusterValues(t)+"engineExample: {enabled: true}\n")
	if a, b := slices.Sorted(maps.Keys(want)), slices.Sorted(maps.Keys(is)); !slices.Equal(a, b) {
		t.Fatalf("deploy/kubernetes has %q, the chart %q", a, b)
	}
	for name, o := range is {
		labels := at(o, "metadata", "labels").(object)
		for _, label := range []string{"app.kubernetes.io/managed-by", "helm.sh/chart"} {
			if labels[label] == nil {
				t.Errorf("%s has no label %s", name, label)
			}
			delete(labels, label)
		}
		list := differences("", want[name], o)
		sort.Strings(list)
		for _, d := range list {
			t.Errorf("%s (deploy/kubernetes, chart): %s", name, d)
		}
	}
	if _, is := rendered(t, ""); is["StatefulSet engine-example"] != nil {
		t.Error("the example is present by default")
	}
}

// TestValues checks the effect of values on the objects.
func TestValues(t *testing.T) {
	_, all := rendered(t, renderings["everything"])
	set := all["StatefulSet kvatlas-indexer"]
	pod := at(set, "spec", "template", "spec")
	container := at(pod, "containers", 0)
	args := fmt.Sprint(at(container, "args"))
	for _, arg := range []string{"--nats=tls://nats-1:4222,tls://nats-2:4222", "--nats-ca=/etc/kvatlas/nats-ca/ca.crt",
		"--namespace=prod", "--partition-replicas=3", "--nats-replicas=3", "--drain-timeout=60s",
		"--http-cert=/etc/kvatlas/tls/tls.crt",
		"--http-key=/etc/kvatlas/tls/tls.key", "--grpc-listen=0.0.0.0:9003", "--policy=least_load",
		"--http-token-file=/etc/kvatlas/http/token", "--grpc-client-ca=/etc/kvatlas/grpc-ca/ca.crt",
		"--external-metrics-listen=0.0.0.0:6444", "--external-metrics-client-ca=/etc/kvatlas/front-proxy/ca.crt",
		"--external-metrics-client=front-proxy-client,aggregator", "--tokenizers=/etc/kvatlas/tokenizers/tokenizers.yaml"} {
		if !strings.Contains(args, arg) {
			t.Errorf("the indexers have no %s: %s", arg, args)
		}
	}
	check := func(what string, is, want any) {
		t.Helper()
		if fmt.Sprint(is) != fmt.Sprint(want) {
			t.Errorf("%s: %v, want %v", what, is, want)
		}
	}
	check("replicas", at(set, "spec", "replicas"), 5)
	check("image", at(container, "image"), "kvatlas/kvatlas:v0.4.0")
	check("pull policy", at(container, "imagePullPolicy"), "IfNotPresent")
	check("pull secret", at(pod, "imagePullSecrets", 0, "name"), "registry")
	check("grace", at(pod, "terminationGracePeriodSeconds"), 75)
	check("memory", at(container, "resources", "limits", "memory"), "8Gi")
	check("node selector", at(pod, "nodeSelector", "disk"), "fast")
	check("toleration", at(pod, "tolerations", 0, "key"), "gpu")
	check("annotation", at(set, "spec", "template", "metadata", "annotations", "a"), "b")
	for _, probe := range []string{"startupProbe", "readinessProbe", "livenessProbe"} {
		check(probe, at(container, probe, "httpGet", "scheme"), "HTTPS")
	}
	secrets := fmt.Sprint(at(pod, "volumes"))
	for _, name := range []string{"my-token", "my-tls", "my-key", "nats-ca", "my-gateways", "my-front-proxy",
		"my-engine-token"} {
		if !strings.Contains(secrets, "secretName:"+name) {
			t.Errorf("no volume has the secret %s: %s", name, secrets)
		}
	}
	if mounts := fmt.Sprint(at(container, "volumeMounts")); !strings.Contains(mounts,
		"map[mountPath:/etc/engine-token name:engine-token readOnly:true]") {
		t.Errorf("the indexers do not mount extraVolumeMounts: %s", mounts)
	}
	check("grpc", at(all["Service kvatlas-indexer"], "spec", "ports", 1, "port"), 9003)
	check("external metrics", at(all["Service kvatlas-indexer"], "spec", "ports", 2, "port"), 6444)
	service := at(all["APIService v1beta1.external.metrics.k8s.io"], "spec")
	check("the service of the API", at(service, "service"), "map[name:kvatlas-indexer namespace:inference port:6444]")
	check("the authority of the API", at(service, "caBundle"), "Y2E=")
	check("budget", at(all["PodDisruptionBudget kvatlas-indexer"], "spec", "maxUnavailable"), "40%")
	for name := range all {
		if strings.HasSuffix(name, " kvatlas-nats") {
			t.Errorf("%s is there with NATS servers of another", name)
		}
	}
	shim := at(all["StatefulSet engine-example"], "spec", "template", "spec", "initContainers", 0)
	check("the shim's restarts", at(shim, "restartPolicy"), "Always")
	if words := fmt.Sprint(at(shim, "args")); !strings.Contains(words, "--model=llama --block-size=64 "+
		"--serving-endpoint=http://$(POD_IP):8000 --nats=tls://nats-1:4222,tls://nats-2:4222 --nats-nkey=/etc/kvatlas/shim.nk --nats-inbox-prefix=_INBOX_pool-llama "+
		"--nats-ca=/etc/kvatlas/nats-ca/ca.crt --namespace=prod --log-format=json --ranks=2 --taint=spot") {
		t.Errorf("the shim has %s", words)
	}

	monitor := all["ServiceMonitor kvatlas-indexer"]
	endpoint := at(monitor, "spec", "endpoints", 0)
	check("monitor's label", at(monitor, "metadata", "labels", "release"), "prometheus")
	check("monitor's token", at(endpoint, "authorization", "credentials"), "map[key:token name:my-read-token]")
	check("monitor's scheme", at(endpoint, "scheme"), "https")
	check("monitor's authority", at(endpoint, "tlsConfig", "ca", "secret", "name"), "my-ca")
	check("monitor's job", at(endpoint, "relabelings", 0, "replacement"), "kvatlas")
	shims := at(all["PodMonitor kvatlas-shims"], "spec", "podMetricsEndpoints", 0)
	check("the shims' job", at(shims, "relabelings", 0, "replacement"), "kvatlas-shim")
	check("the shims' token", at(shims, "authorization", "credentials", "name"), "kvatlas-shim-metrics")
	rules, err := os.ReadFile(filepath.Join(root, "deploy/prometheus/rules.yml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range differences("", objects(t, "kind: Rules\n"+string(rules))["Rules <nil>"]["groups"],
		at(all["PrometheusRule kvatlas"], "spec", "groups")) {
		t.Errorf("deploy/prometheus/rules.yml and files/rules.yml of the chart differ: %s", d)
	}
	check("tokenizers", at(all["ConfigMap kvatlas-indexer-tokenizers"], "data", "tokenizers.yaml"),
		"models:\n  llama:\n    engines: tokenize\n")
	check("monitor's name", at(endpoint, "tlsConfig", "serverName"), "kvatlas-indexer.inference.svc")
	selector := at(monitor, "spec", "selector", "matchLabels").(object)
	selected := []string{}
	for name, o := range all {
		labels, _ := at(o, "metadata", "labels").(object)
		if o["kind"] == "Service" && len(differences("", selector, subset(labels, selector))) == 0 {
			selected = append(selected, name)
		}
	}
	check("the services of the monitor", selected, "[Service kvatlas-indexer]")

	const cluster = "nats: {mode: cluster, podDisruptionBudget: {enabled: %t}}\n" +
		"indexer: {replicas: 3, podDisruptionBudget: {enabled: %t}}\nnetworkPolicy: {enabled: %t}\n"
	for gone, switched := range map[string]string{
		"PodDisruptionBudget kvatlas-nats":    fmt.Sprintf(cluster, false, true, true),
		"PodDisruptionBudget kvatlas-indexer": fmt.Sprintf(cluster, true, false, true),
		"NetworkPolicy kvatlas-nats":          fmt.Sprintf(cluster, true, true, false),
		"NetworkPolicy kvatlas-indexer":       fmt.Sprintf(cluster, true, true, false),
		"ServiceMonitor kvatlas-indexer":      fmt.Sprintf(cluster, true, true, true),
	} {
		if _, all := rendered(t, switched); all[gone] != nil {
			t.Errorf("%s is there with %s", gone, switched)
		}
	}
	_, all = rendered(t, renderings["embedded"])
	set = all["StatefulSet kvatlas-indexer"]
	check("storage class", at(set, "spec", "volumeClaimTemplates", 0, "spec", "storageClassName"), "fast")
	if args := fmt.Sprint(at(set, "spec", "template", "spec", "containers", 0, "args")); strings.Contains(args,
		"--nats=") || !strings.Contains(args, "--nats-config=/etc/kvatlas/accounts/accounts.conf") {
		t.Errorf("the indexer with the server in it has %s", args)
	}
	if _, is := rendered(t, ""); is["PodDisruptionBudget kvatlas-indexer"] != nil {
		t.Error("a PodDisruptionBudget is there for the only indexer: it would block every drain")
	}
	_, all = rendered(t, "nats: {mode: cluster, replicas: 5}")
	conf := fmt.Sprint(at(all["ConfigMap kvatlas-nats"], "data", "nats.conf"))
	check("routes", strings.Count(conf, ".kvatlas-nats:6222"), 5)
}

// TestRefusedValues checks that invalid values are refused, and that the error names the value.
func TestRefusedValues(t *testing.T) {
	const samePort = `
grpc: {enabled: true}
http: {tlsSecret: t}
externalMetrics: {enabled: true, caBundle: Y2E=, port: 9002}
`
	for text, word := range map[string]string{
		"indexer: {replica: 3}":                      "replica",
		"indexer: {replicas: three}":                 "replicas",
		"indexer: {replicas: 0}":                     "replicas",
		"indexer: {extraArgs: [policy]}":             "extraArgs",
		"indexer: {extraVolumes: [{secret: {}}]}":    "extraVolumes",
		"indexer: {extraVolumeMounts: [{name: a}]}":  "extraVolumeMounts",
		"http: {tokenSecret: \"\"}":                  "tokenSecret",
		"namespace: Prod":                            "namespace",
		"nats: {mode: none}":                         "mode",
		"nats: {mode: external}":                     "url",
		"nats: {replicas: 2}":                        "replicas",
		"nats: {mode: cluster, replicas: 1}":         "replicas",
		"indexer: {replicas: 2}":                     "values-cluster.yaml",
		"nats: {nkeySecret: \"\"}":                   "nats.nkeySecret",
		"serviceMonitor: {interval: often}":          "interval",
		"tokenizers: [llama]":                        "tokenizers",
		"image: {pullPolicy: Sometimes}":             "pullPolicy",
		"grpc: {port: 8090}":                         "port",
		"grpc: {enabled: true, insecure: sometimes}": "insecure",
		"grpc: {enabled: true, insecure: true}":      "grpcFrom",
		"grpc: {insecure: true}":                     "grpc.enabled",
		"grpc: {enabled: true, clientCASecret: c}":   "http.tlsSecret",
		"{grpc: {enabled: true, insecure: true}, networkPolicy: {enabled: false}}": "networkPolicy.enabled",
		"indexer: {podDisruptionBudget: {maxUnavailable: -1}}":                     "maxUnavailable",
		"networkPolicy: {httpFrom: []}":                                            "httpFrom",
		"networkPolicy: {dns: [{ip: 10.0.0.1}]}":                                   "dns",
		"networkPolicy: {enginePorts: [http]}":                                     "enginePorts",
		"externalMetrics: {enabled: true, caBundle: Y2E=}":                         "http.tlsSecret",
		"{externalMetrics: {enabled: true}, http: {tlsSecret: t}}":                 "externalMetrics.caBundle",
		"externalMetrics: {clientNames: []}":                                       "clientNames",
		"externalMetrics: {port: 4222}":                                            "port",
		samePort:                                                                   "gRPC",
		"engineExample: {pool: a/b}":                                               "pool",
		"engineExample: {extraArgs: [ranks]}":                                      "extraArgs",
	} {
		if _, err := render(t, text); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// help returns a program's help of a command.
func help(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command(filepath.Join(dir, args[0]), append(args[1:], "--help")...)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v", cmd, err)
	}
	return string(out)
}

// TestProgramsHaveFlags checks that the programs have the flags in the chart, and that the chart has the programs'
// version.
func TestProgramsHaveFlags(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command("go", "build", "-buildvcs=false", "-o", dir+"/", "./cmd/indexer", "./cmd/worker-shim")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	said := map[string]string{"serve": help(t, dir, "indexer", "serve"),
		"run": help(t, dir, "worker-shim", "run"), "simulate": help(t, dir, "worker-shim", "simulate")}
	checked := 0
	for name, text := range allRenderings(t) {
		_, all := rendered(t, text)
		for _, o := range all {
			for _, c := range containersOf(at(o, "spec", "template", "spec")) {
				args, _ := at(c, "args").([]any)
				if at(c, "name") == "nats" {
					continue
				}
				for _, arg := range args[1:] {
					flag := regexp.MustCompile(`^--[a-z0-9-]+`).FindString(fmt.Sprint(arg))
					if checked++; flag == "" || !strings.Contains(said[fmt.Sprint(args[0])], " "+flag+" ") {
						t.Errorf("%s: %v has no flag %v", name, args[0], arg)
					}
				}
			}
		}
	}
	if checked < 40 {
		t.Errorf("only %d flags were looked at", checked)
	}
}

// TestSecure checks that no container runs as root, can become root, or writes outside of volumes, and that all servers
// on public addresses require a token.
func TestSecure(t *testing.T) {
	pods := 0
	for name, text := range allRenderings(t) {
		_, all := rendered(t, text)
		for id, o := range all {
			pod := at(o, "spec", "template", "spec")
			if pod == nil {
				continue
			}
			pods++
			for _, p := range []string{"hostNetwork", "hostPID", "hostIPC"} {
				if at(pod, p) != nil {
					t.Errorf("%s: %s has %s", name, id, p)
				}
			}
			if at(pod, "securityContext", "runAsNonRoot") != true ||
				at(pod, "securityContext", "seccompProfile", "type") != "RuntimeDefault" ||
				at(pod, "automountServiceAccountToken") != false {
				t.Errorf("%s: %s: %v", name, id, at(pod, "securityContext"))
			}
			for _, c := range containersOf(pod) {
				if fmt.Sprint(at(c, "securityContext")) !=
					"map[allowPrivilegeEscalation:false capabilities:map[drop:[ALL]] readOnlyRootFilesystem:true]" {
					t.Errorf("%s: %s: %v", name, id, at(c, "securityContext"))
				}
				if args := fmt.Sprint(at(c, "args")); strings.Contains(args, "--http-listen=0.0.0.0") &&
					!strings.Contains(args, "--http-token-file=") {
					t.Errorf("%s: %s listens without a token: %s", name, id, args)
				}
			}
		}
	}
	if pods < 6 {
		t.Errorf("only %d pods were looked at", pods)
	}
}

// TestPolicies checks the policies for all values. A policy for both directions selects every pod. No rule allows
// connections to all addresses, and no rule allows the metadata addresses of clouds, which serve a machine's
// credentials. TestClusterIsTheManifests and integration's TestNetworkPolicies check further properties of the default.
func TestPolicies(t *testing.T) {
	for name, text := range allRenderings(t) {
		_, all := rendered(t, text)
		selected := map[string]bool{}
		for id, o := range all {
			if o["kind"] != "NetworkPolicy" {
				continue
			}
			if types := fmt.Sprint(at(o, "spec", "policyTypes")); types != "[Ingress Egress]" {
				t.Errorf("%s: %s is for %s", name, id, types)
			}
			selected[fmt.Sprint(at(o, "spec", "podSelector", "matchLabels", "app.kubernetes.io/name"))] = true
			for direction, peers := range map[string]string{"ingress": "from", "egress": "to"} {
				rules, _ := at(o, "spec", direction).([]any)
				for _, rule := range rules {
					if list, _ := at(rule, peers).([]any); len(list) == 0 || at(rule, "ports") == nil {
						t.Errorf("%s: %s has a rule for everything: %v", name, id, rule)
					}
				}
			}
			for _, m := range regexp.MustCompile(`cidr:(\S+?)[ \]](?:except:\[([^\]]*))?`).FindAllStringSubmatch(
				fmt.Sprint(at(o, "spec", "egress")), -1) {
				if !strings.Contains(m[2], "169.254.0.0/16") && !strings.Contains(m[2], "fe80::/10") {
					t.Errorf("%s: %s allows %s", name, id, m[0])
				}
			}
		}
		for id, o := range all {
			label := at(o, "spec", "template", "metadata", "labels", "app.kubernetes.io/name")
			if label != nil && !selected[fmt.Sprint(label)] {
				t.Errorf("%s: no policy selects the pods of %s", name, id)
			}
		}
	}
	_, all := rendered(t, renderings["everything"])
	spec := fmt.Sprint(at(all["NetworkPolicy kvatlas-indexer"], "spec"))
	for _, part := range []string{"team:routing", "port:9003", "port:6444", "port:30000", "app:collector", "port:4222",
		"0.0.0.0/0", "namespaceSelector:map[]"} {
		if !strings.Contains(spec, part) {
			t.Errorf("the indexers' policy has no %s: %s", part, spec)
		}
	}
	_, all = rendered(t, renderings["embedded"])
	ingress := fmt.Sprint(at(all["NetworkPolicy kvatlas-indexer"], "spec", "ingress"))
	if !strings.Contains(ingress, "port:4222") {
		t.Errorf("shims do not reach the NATS server in the indexer: %s", ingress)
	}
}

// TestOwnKeys checks that a container mounts only its own secrets, and only a single file of a secret with several
// keys.
func TestOwnKeys(t *testing.T) {
	for name, text := range map[string]string{"default": renderings["default, with an engine"],
		"everything": renderings["everything"]} {
		_, all := rendered(t, text)
		pod := at(all["StatefulSet engine-example"], "spec", "template", "spec")
		mounts := fmt.Sprint(at(pod, "initContainers", 0, "volumeMounts", 0))
		file := map[string]string{"default": "$(POD_NAME).nk", "everything": "llama.nk"}[name]
		if mounts != "map[mountPath:/etc/kvatlas/shim.nk name:keys readOnly:true subPathExpr:"+file+"]" {
			t.Errorf("%s: the shim mounts %s", name, mounts)
		}
		if engine := at(pod, "containers", 0, "volumeMounts"); engine != nil {
			t.Errorf("%s: the engine mounts %v", name, engine)
		}
		for id, o := range all {
			secrets := fmt.Sprint(at(o, "spec", "template", "spec", "volumes"))
			for _, other := range []string{"kvatlas-shims", "my-pool"} {
				if id != "StatefulSet engine-example" && strings.Contains(secrets, other) {
					t.Errorf("%s: %s mounts %s", name, id, secrets)
				}
			}
		}
	}
}

// TestNotes checks that the output of an installation names the secrets and the address.
func TestNotes(t *testing.T) {
	files, err := render(t, renderings["everything"])
	if err != nil {
		t.Fatal(err)
	}
	notes := files["kvatlas/templates/NOTES.txt"]
	for _, word := range []string{"my-token", "my-key", "https://kvatlas-indexer.inference:8090", "9003", "tls://nats-1:4222"} {
		if !strings.Contains(notes, word) {
			t.Errorf("the notes do not name %s:\n%s", word, notes)
		}
	}
}

// TestOldValues: the old name of a value has the effect of the new name, and the notes have a warning.
func TestOldValues(t *testing.T) {
	const old = "indexer: {replicas: 3, replication: 3}\nnats: {mode: external, url: nats://nats:4222}\n"
	files, err := render(t, old)
	if err != nil {
		t.Fatal(err)
	}
	if text := files["kvatlas/templates/indexer.yaml"]; !strings.Contains(text, "--partition-replicas=3") {
		t.Errorf("the indexers have no --partition-replicas=3:\n%s", text)
	}
	const warning = "indexer.replication is the old name of indexer.partitionReplicas"
	if notes := files["kvatlas/templates/NOTES.txt"]; !strings.Contains(notes, warning) {
		t.Errorf("no warning: %s", notes)
	}
	files, err = render(t, strings.Replace(old, "replication", "partitionReplicas", 1))
	if err != nil || strings.Contains(files["kvatlas/templates/NOTES.txt"], "old name") {
		t.Errorf("%v, %s", err, files["kvatlas/templates/NOTES.txt"])
	}
}

// TestRenderings compares testdata with the chart. integration/judges/kubernetes uses testdata.
func TestRenderings(t *testing.T) {
	for _, name := range []string{"embedded", "everything"} {
		text, _ := rendered(t, renderings[name])
		file := filepath.Join("testdata", name+".yaml")
		text = "# Rendered by go test . -update: do not edit.\n" + text
		if *update {
			if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if is, err := os.ReadFile(file); err != nil || string(is) != text {
			t.Errorf("%s differs from the chart (%v): rewrite with go test . -update", file, err)
		}
	}
}

// TestOtherRelease checks that the names of two releases in a namespace differ, except for the names of the example.
func TestOtherRelease(t *testing.T) {
	options := chartutil.ReleaseOptions{Name: "blue", Namespace: "inference", Revision: 1, IsInstall: true}
	with, err := chartutil.ToRenderValues(load(t), values{}, options, nil)
	if err != nil {
		t.Fatal(err)
	}
	files, err := engine.Render(load(t), with)
	if err != nil {
		t.Fatal(err)
	}
	for file, text := range files {
		if filepath.Ext(file) != ".yaml" {
			continue
		}
		for name := range objects(t, text) {
			if !strings.Contains(name, " blue-kvatlas-") {
				t.Errorf("%s has %s", file, name)
			}
		}
		if strings.Contains(text, " kvatlas-indexer") || strings.Contains(text, "//kvatlas-nats") {
			t.Errorf("%s names another release's objects:\n%s", file, text)
		}
	}
}

// TestShimTemplateOfThePage renders the lines of docs/kubernetes.md in a chart that depends on this chart.
func TestShimTemplateOfThePage(t *testing.T) {
	page, err := os.ReadFile(root + "/docs/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	_, lines, found := strings.Cut(string(page), "\n    initContainers:\n")
	lines, _, ends := strings.Cut(lines, "\n\n")
	if !found || !ends {
		t.Fatal("the page has no initContainers of a chart")
	}
	parent := &chart.Chart{Metadata: &chart.Metadata{APIVersion: "v2", Name: "parent", Version: "0.1.0",
		Dependencies: []*chart.Dependency{{Name: "kvatlas", Version: load(t).Metadata.Version}}},
		Templates: []*chart.File{{Name: "templates/pod.yaml",
			Data: []byte("kind: Pod\nmetadata: {name: engine}\nspec:\n    initContainers:\n" + lines + "\n")}}}
	parent.AddDependency(load(t))
	options := chartutil.ReleaseOptions{Name: "blue", Namespace: "inference", Revision: 1, IsInstall: true}
	with, err := chartutil.ToRenderValues(parent, values{}, options, nil)
	if err != nil {
		t.Fatal(err)
	}
	files, err := engine.Render(parent, with)
	if err != nil {
		t.Fatal(err)
	}
	shim := at(objects(t, files["parent/templates/pod.yaml"])["Pod engine"], "spec", "initContainers", 0)
	if at(shim, "restartPolicy") != "Always" || at(shim, "name") != "shim" {
		t.Errorf("the container is %v", shim)
	}
	words := fmt.Sprint(at(shim, "args"))
	for _, word := range []string{"--model=qwen3", "--serving-endpoint=http://$(POD_IP):8000", "--ranks=2]",
		"--nats=nats://blue-kvatlas-indexer-nodes:4222", "--nats-inbox-prefix=_INBOX_pool-qwen3"} {
		if !strings.Contains(words, word) {
			t.Errorf("the shim has no %s: %s", word, words)
		}
	}
}
