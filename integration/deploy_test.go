package integration

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"go.yaml.in/yaml/v3"
)

// composeFile has the used fields of docker-compose.yml.
type composeFile struct {
	Services map[string]struct {
		Image       string
		Command     []string
		ReadOnly    bool     `yaml:"read_only"`
		CapDrop     []string `yaml:"cap_drop"`
		CapAdd      []string `yaml:"cap_add"`
		SecurityOpt []string `yaml:"security_opt"`
		Privileged  bool
		User        string
		NetworkMode string `yaml:"network_mode"`
		Pid         string
		Devices     []string
		Networks    []string
		Ports       []string
		Volumes     []string
		Environment map[string]string
		Secrets     []composeSecret
	}
	Networks map[string]struct{ Internal bool }
	Secrets  map[string]struct{ File string }
}

// composeSecret is a secret of a service: only a name, or a name with a file name.
type composeSecret struct{ Source, Target string }

func (s *composeSecret) UnmarshalYAML(n *yaml.Node) error {
	if n.Kind == yaml.ScalarNode {
		s.Source, s.Target = n.Value, n.Value
		return nil
	}
	type plain composeSecret
	return n.Decode((*plain)(s))
}

func readCompose(t *testing.T) (c composeFile) {
	t.Helper()
	if err := yaml.Unmarshal([]byte(readFile(t, "../docker-compose.yml")), &c); err != nil {
		t.Fatal(err)
	}
	if len(c.Services) < 11 {
		t.Fatalf("docker-compose.yml has only %d services", len(c.Services))
	}
	return c
}

// TestComposeIsHardened checks that no container has capabilities, can gain privileges or can write to the root file
// system, and that every port is on loopback. `integration/compose/run.sh` checks the running processes.
func TestComposeIsHardened(t *testing.T) {
	t.Parallel()
	for name, s := range readCompose(t).Services {
		if !slices.Equal(s.CapDrop, []string{"ALL"}) || len(s.CapAdd) > 0 || s.Privileged || s.NetworkMode != "" ||
			s.Pid != "" || len(s.Devices) > 0 || s.User != "" && !strings.HasPrefix(s.User, "65532") {
			t.Errorf("%s has unnecessary rights: %+v", name, s)
		}
		if !slices.Contains(s.SecurityOpt, "no-new-privileges:true") {
			t.Errorf("%s may gain privileges: %q", name, s.SecurityOpt)
		}
		if !s.ReadOnly {
			t.Errorf("%s may write to the root file system", name)
		}
		for _, v := range s.Volumes {
			if file := strings.HasPrefix(v, "."); file != strings.HasSuffix(v, ":ro") {
				t.Errorf("%s mounts %s: files of the repository are read-only, and data is a volume", name, v)
			}
		}
		for _, p := range s.Ports {
			if !strings.HasPrefix(p, "127.0.0.1:") {
				t.Errorf("%s publishes %s on all addresses", name, p)
			}
		}
	}
}

// TestComposeKeys checks that every NATS client has a separate key with its own inbox prefix, and no unnecessary
// secret. Engines share a network only with their shim.
func TestComposeKeys(t *testing.T) {
	t.Parallel()
	c := readCompose(t)
	shims := map[string]string{} // by key
	for name, s := range c.Services {
		var secrets []string
		for _, secret := range s.Secrets {
			secrets = append(secrets, secret.Source+":"+secret.Target)
		}
		slices.Sort(secrets)
		kind, number, _ := strings.Cut(name, "-")
		var want []string
		networks := s.Networks
		switch kind {
		case "nats":
			want = []string{"accounts.conf:accounts.conf", "routes.conf:routes.conf"}
		case "indexer":
			want = []string{"http-token:http-token", "node:nats.nk"}
			if p := s.Environment["KVATLAS_NATS_INBOX_PREFIX"]; p != "_INBOX_node" {
				t.Errorf("%s has the inbox prefix %q", name, p)
			}
		case "engine":
			if !slices.Equal(networks, []string{name}) || !c.Networks[name].Internal {
				t.Errorf("%s is in the networks %q: %+v", name, networks, c.Networks)
			}
		case "shim":
			worker := s.Command[slices.Index(s.Command, "--worker")+1]
			want = []string{"http-token:http-token", "shim-" + worker + ":nats.nk"}
			if p := s.Environment["KVATLAS_NATS_INBOX_PREFIX"]; p != "_INBOX_shim-"+worker {
				t.Errorf("%s has the inbox prefix %q", name, p)
			}
			if file := c.Secrets["shim-"+worker].File; filepath.Base(file) != "default-shim-"+worker+".nk" ||
				shims[file] != "" {
				t.Errorf("%s has the key %s, as %s has", name, file, shims[file])
			} else {
				shims[file] = name
			}
			if !slices.Equal(networks, []string{"default", "engine-" + number}) {
				t.Errorf("%s is in the networks %q", name, networks)
			}
		case "prometheus":
			want = []string{"http-token:http-token"}
		default:
			t.Errorf("the test has no list of the secrets for %s", name)
		}
		if !slices.Equal(secrets, want) {
			t.Errorf("%s has the secrets %q, not %q", name, secrets, want)
		}
		if key := s.Environment["NATS_NKEY"]; (s.Environment["NATS_URL"] != "") != (key == "/run/secrets/nats.nk") {
			t.Errorf("%s connects to NATS with the key %q", name, key)
		}
	}
	conf := readFile(t, "../deploy/docker/nats.conf")
	for _, included := range []string{"  include ./run/secrets/routes.conf\n", "\ninclude ./run/secrets/accounts.conf\n"} {
		if !strings.Contains(conf, included) {
			t.Errorf("nats.conf has no %q", included)
		}
	}
}

// TestComposeSecrets makes the secrets twice: the second run changes none. Only the folder's owner has access.
// docker-compose.yml mounts the secrets, and nats-server accepts them with nats.conf: clients need a key, and other
// servers need a password.
func TestComposeSecrets(t *testing.T) {
	t.Parallel()
	folder := filepath.Join(t.TempDir(), "secrets")
	made := func() map[string]string {
		t.Helper()
		cmd := exec.Command("../deploy/docker/secrets.sh", harness.Program(t, "indexer"), folder)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		all := map[string]string{}
		for _, secret := range readCompose(t).Secrets {
			file := regexp.MustCompile(`\./bin/secrets/([^}]*)`).FindStringSubmatch(secret.File)
			if file == nil {
				t.Fatalf("%s is not in bin/secrets", secret.File)
			}
			path := filepath.Join(folder, file[1])
			all[file[1]] = readFile(t, path)
			if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o644 {
				t.Errorf("containers cannot read %s: %v %v", path, info.Mode(), err)
			}
		}
		return all
	}
	first := made()
	if second := made(); len(first) < 6 || !maps.Equal(first, second) {
		t.Errorf("the second run changes secrets:\n%q\n%q", first, second)
	}
	if info, err := os.Stat(folder); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("other users of this host can read the secrets: %v %v", info.Mode(), err)
	}
	for file, secret := range first {
		if strings.Contains(file, "conf") {
			continue
		}
		if len(strings.TrimSpace(secret)) < 16 {
			t.Errorf("%s is short: %q", file, secret)
		}
	}

	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "run"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(folder, filepath.Join(dir, "run", "secrets")); err != nil {
		t.Fatal(err)
	}
	conf := strings.NewReplacer("0.0.0.0:4222", "127.0.0.1:-1", "127.0.0.1:8222",
		"127.0.0.1:-1", "0.0.0.0:6222", "127.0.0.1:-1", "/data", filepath.Join(dir, "data"), "$NATS_NAME", "nats-1").
		Replace(readFile(t, "../deploy/docker/nats.conf"))
	file := filepath.Join(dir, "nats.conf")
	if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := harness.Run(t, "nats-server", "-t", "--config", file); r.Code != 0 {
		t.Fatalf("%+v", r)
	}
	server := harness.Start(t, "nats-server", "--config", file)
	at := server.WaitFor(`Listening for client connections on (\S+)`)[1]
	routes := server.WaitFor(`Listening for route connections on (\S+)`)[1]
	if r := harness.Run(t, "indexer", "status", "--nats", at); r.Code == 0 ||
		!strings.Contains(strings.ToLower(r.Stderr), "auth") {
		t.Errorf("without a key: %+v", r)
	}
	intruder := harness.Start(t, "nats-server", "-a", "127.0.0.1", "-p", "-1", "--cluster_name", "kvatlas", "--cluster",
		"nats://127.0.0.1:-1", "--routes", "nats://"+routes)
	intruder.WaitFor(`(?i)authorization`)
}

// TestUnitsAreHardened checks that the units of deploy/systemd run as an unprivileged user, write only to their state,
// and cannot reach link-local addresses. In integration/judges/packaging, systemd reads and rates the units.
func TestUnitsAreHardened(t *testing.T) {
	t.Parallel()
	for _, unit := range []string{"kvatlas-indexer.service", "kvatlas-worker-shim@.service"} {
		set := commands(readFile(t, filepath.Join("../deploy/systemd", unit)), "")
		for _, setting := range []string{"DynamicUser=yes", "AmbientCapabilities=", "CapabilityBoundingSet=",
			"IPAddressDeny=link-local fd00:ec2::/32", "LimitCORE=0", "MemoryDenyWriteExecute=yes", "NoNewPrivileges=yes",
			"PrivateDevices=yes", "PrivateMounts=yes", "PrivateTmp=yes", "PrivateUsers=yes", "ProtectHome=yes",
			"ProtectSystem=strict", "RestrictNamespaces=yes", "RestrictSUIDSGID=yes", "SystemCallArchitectures=native",
			"SystemCallFilter=@system-service", "SystemCallFilter=~@privileged @resources", "UMask=0077"} {
			if !slices.Contains(set, setting) {
				t.Errorf("%s has no %s", unit, setting)
			}
		}
		for _, setting := range set {
			if key, _, _ := strings.Cut(setting, "="); slices.Contains([]string{"User", "ReadWritePaths", "BindPaths"}, key) {
				t.Errorf("%s has %s", unit, setting)
			}
		}
	}
}

// The rest looks at deploy/kubernetes.

type labels map[string]string

// selector selects objects by labels; nil selects no object, an empty selector all objects.
type selector struct {
	MatchLabels      labels `yaml:"matchLabels"`
	MatchExpressions []any  `yaml:"matchExpressions"`
}

func (s *selector) selects(t *testing.T, of labels) bool {
	if len(s.MatchExpressions) > 0 {
		t.Fatal("the test does not evaluate matchExpressions")
	}
	for name, value := range s.MatchLabels {
		if of[name] != value {
			return false
		}
	}
	return true
}

type peer struct {
	PodSelector       *selector `yaml:"podSelector"`
	NamespaceSelector *selector `yaml:"namespaceSelector"`
	IPBlock           *struct {
		CIDR   netip.Prefix
		Except []netip.Prefix
	} `yaml:"ipBlock"`
}

type rule struct {
	From, To []peer
	Ports    []struct {
		Port     int
		EndPort  int `yaml:"endPort"`
		Protocol string
	}
}

// kubernetesObject has the used fields of a Kubernetes object.
type kubernetesObject struct {
	Kind     string
	Metadata struct{ Name string }
	Spec     struct {
		PodSelector     selector `yaml:"podSelector"`
		PolicyTypes     []string `yaml:"policyTypes"`
		Ingress, Egress []rule
		Template        struct {
			Metadata struct{ Labels labels }
			Spec     struct {
				HostNetwork                  bool  `yaml:"hostNetwork"`
				AutomountServiceAccountToken *bool `yaml:"automountServiceAccountToken"`
				SecurityContext              struct {
					RunAsNonRoot   bool                  `yaml:"runAsNonRoot"`
					SeccompProfile struct{ Type string } `yaml:"seccompProfile"`
				} `yaml:"securityContext"`
				InitContainers []podContainer `yaml:"initContainers"`
				Containers     []podContainer
				Volumes        []struct {
					Name   string
					Secret struct {
						SecretName string `yaml:"secretName"`
					}
				}
			}
		}
	}
}

// podContainer has the used fields of a container.
type podContainer struct {
	Name            string
	SecurityContext struct {
		AllowPrivilegeEscalation *bool `yaml:"allowPrivilegeEscalation"`
		ReadOnlyRootFilesystem   bool  `yaml:"readOnlyRootFilesystem"`
		Capabilities             struct{ Drop, Add []string }
	} `yaml:"securityContext"`
	VolumeMounts []struct {
		Name        string
		SubPathExpr string `yaml:"subPathExpr"`
		ReadOnly    bool   `yaml:"readOnly"`
	} `yaml:"volumeMounts"`
}

// kubernetesObjects reads files of deploy/kubernetes.
func kubernetesObjects(t *testing.T, patterns ...string) (all []kubernetesObject) {
	t.Helper()
	for _, pattern := range patterns {
		files, err := filepath.Glob(filepath.Join("../deploy/kubernetes", pattern))
		if err != nil || len(files) == 0 {
			t.Fatal(pattern, files, err)
		}
		for _, file := range files {
			for d := yaml.NewDecoder(strings.NewReader(readFile(t, file))); ; {
				var o kubernetesObject
				if err := d.Decode(&o); errors.Is(err, io.EOF) {
					break
				} else if err != nil && o.Kind != "Service" && o.Kind != "InferencePool" {
					t.Fatalf("%s: %v", file, err)
				}
				all = append(all, o)
			}
		}
	}
	return all
}

// TestPodsAreHardened checks that pods of deploy/kubernetes do not run as root, cannot become root, write only to
// volumes, and have no token of the cluster. Two kinds of pods never mount the same secret, and a shim gets a single
// file of the shims' secret.
func TestPodsAreHardened(t *testing.T) {
	t.Parallel()
	pods, secrets := 0, map[string]string{}
	for _, o := range kubernetesObjects(t, "*.yaml", "gateway/*.yaml") {
		pod := o.Spec.Template.Spec
		if len(pod.Containers) == 0 {
			continue
		}
		pods++
		if s := pod.SecurityContext; pod.HostNetwork || !s.RunAsNonRoot || s.SeccompProfile.Type != "RuntimeDefault" ||
			pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken {
			t.Errorf("%s: %+v", o.Metadata.Name, pod)
		}
		for _, v := range pod.Volumes {
			name := v.Secret.SecretName
			if name == "" {
				continue
			}
			if other := secrets[name]; other != "" {
				t.Errorf("%s and %s mount the secret %s", o.Metadata.Name, other, name)
			}
			secrets[name] = o.Metadata.Name
		}
		for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
			s := c.SecurityContext
			if s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || !s.ReadOnlyRootFilesystem ||
				!slices.Equal(s.Capabilities.Drop, []string{"ALL"}) || len(s.Capabilities.Add) > 0 {
				t.Errorf("%s, %s: %+v", o.Metadata.Name, c.Name, s)
			}
			for _, m := range c.VolumeMounts {
				if !m.ReadOnly && m.Name != "data" {
					t.Errorf("%s, %s may write to %s", o.Metadata.Name, c.Name, m.Name)
				}
				if c.Name == "engine" || c.Name == "shim" && m.SubPathExpr != "$(POD_NAME).nk" {
					t.Errorf("%s, %s mounts all keys of %s", o.Metadata.Name, c.Name, m.Name)
				}
			}
		}
	}
	if pods < 3 || len(secrets) < 4 {
		t.Errorf("only %d pods with %d secrets were looked at", pods, len(secrets))
	}
}

// end is an end of a connection: a pod of the namespace kvatlas or of another namespace, or an address outside of the
// cluster.
type end struct {
	pod       labels
	namespace string
	address   netip.Addr
}

func (p peer) has(t *testing.T, e end) bool {
	switch {
	case p.IPBlock != nil:
		return e.address.IsValid() && p.IPBlock.CIDR.Contains(e.address) &&
			!slices.ContainsFunc(p.IPBlock.Except, func(x netip.Prefix) bool { return x.Contains(e.address) })
	case e.address.IsValid():
		return false
	case p.NamespaceSelector != nil:
		if !p.NamespaceSelector.selects(t, labels{"kubernetes.io/metadata.name": e.namespace}) {
			return false
		}
	case e.namespace != "kvatlas":
		return false
	}
	return p.PodSelector == nil || p.PodSelector.selects(t, e.pod)
}

// allows reports whether the policies permit a connection from a peer to the pod (Ingress), or from the pod to a peer
// (Egress).
func allows(t *testing.T, policies []kubernetesObject, direction string, e, other end, port int, protocol string) bool {
	selected := false
	for _, p := range policies {
		if e.namespace != "kvatlas" || !p.Spec.PodSelector.selects(t, e.pod) ||
			!slices.Contains(p.Spec.PolicyTypes, direction) {
			continue
		}
		selected = true
		rules := p.Spec.Ingress
		if direction == "Egress" {
			rules = p.Spec.Egress
		}
		for _, r := range rules {
			peers := append(slices.Clone(r.From), r.To...)
			with := len(peers) == 0 || slices.ContainsFunc(peers, func(p peer) bool { return p.has(t, other) })
			at := len(r.Ports) == 0
			for _, p := range r.Ports {
				at = at || p.Protocol == protocol && port >= p.Port && port <= max(p.Port, p.EndPort)
			}
			if with && at {
				return true
			}
		}
	}
	return !selected
}

// TestNetworkPolicies evaluates the policies of deploy/kubernetes by the rules of Kubernetes: a connection needs a rule
// at both ends with a policy.
func TestNetworkPolicies(t *testing.T) {
	t.Parallel()
	var policies []kubernetesObject
	here := func(l labels) end { return end{pod: l, namespace: "kvatlas"} }
	ends := map[string]end{
		"a stranger":       here(labels{"app": "x"}),
		"a NATS client":    here(labels{"kvatlas.io/client": "true"}),
		"an HTTP client":   here(labels{"kvatlas.io/http-client": "true"}),
		"another's client": {pod: labels{"kvatlas.io/http-client": "true", "kvatlas.io/client": "true"}, namespace: "x"},
		"Prometheus":       {pod: labels{"app": "prometheus"}, namespace: "monitoring"},
		"a gateway":        {pod: labels{"gateway.networking.k8s.io/gateway-name": "inference"}, namespace: "gateway-system"},
		"its neighbour":    {pod: labels{"app": "x"}, namespace: "gateway-system"},
		"an engine":        here(labels{"kvatlas.io/engine": "true"}),
		"a store":          here(labels{"kvatlas.io/store": "true"}),
		"DNS":              {pod: labels{"k8s-app": "kube-dns"}, namespace: "kube-system"},
		"the metadata":     {address: netip.MustParseAddr("169.254.169.254")},
		"the metadata (6)": {address: netip.MustParseAddr("fd00:ec2::254")},
		"the network":      {address: netip.MustParseAddr("10.0.0.1")},
		"the internet":     {address: netip.MustParseAddr("203.0.113.9")},
	}
	var pods []string
	for _, o := range kubernetesObjects(t, "*.yaml", "gateway/*.yaml") {
		if o.Kind == "NetworkPolicy" {
			policies = append(policies, o)
		}
		if l := o.Spec.Template.Metadata.Labels; l != nil {
			ends[o.Metadata.Name] = here(l)
			pods = append(pods, o.Metadata.Name)
		}
	}
	const nats, indexer, engine = "kvatlas-nats", "kvatlas-indexer", "engine-example"
	allowed := map[string]bool{}
	for _, c := range []struct {
		from, to string
		ports    []int
	}{
		{nats, nats, []int{6222}}, {indexer, nats, []int{4222}}, {engine, nats, []int{4222}},
		{"a NATS client", nats, []int{4222}},
		{"an HTTP client", indexer, []int{8090}}, {"Prometheus", indexer, []int{8090}}, {"a gateway", indexer, []int{9002}},
		{indexer, "an engine", []int{5557, 5657, 8000}}, {indexer, "a store", []int{9003}},
		{indexer, engine, []int{8000}}, {"a gateway", engine, []int{8000}},
		{"its neighbour", engine, []int{8000}},
		{nats, "DNS", []int{53}}, {indexer, "DNS", []int{53}}, {engine, "DNS", []int{53}},
	} {
		for _, port := range c.ports {
			allowed[fmt.Sprint(c.from, " to ", c.to, " at ", port)] = true
		}
	}
	looked := 0
	for from, a := range ends {
		for to, b := range ends {
			if !slices.Contains(pods, from) && !slices.Contains(pods, to) {
				continue // kvatlas has no policies for these
			}
			for _, port := range []int{22, 53, 80, 443, 4222, 5557, 5657, 6222, 8000, 8090, 8222, 9002, 9003, 10250} {
				protocol := "TCP"
				if port == 53 {
					protocol = "UDP"
				}
				is := allows(t, policies, "Egress", a, b, port, protocol) &&
					allows(t, policies, "Ingress", b, a, port, protocol)
				what := fmt.Sprint(from, " to ", to, " at ", port)
				if looked++; is != allowed[what] {
					t.Errorf("%s is allowed: %v", what, is)
				}
			}
		}
	}
	if len(pods) != 3 || looked < 1000 {
		t.Errorf("%d connections of %q were looked at", looked, pods)
	}
	for _, name := range pods {
		for _, direction := range []string{"Ingress", "Egress"} {
			if !slices.ContainsFunc(policies, func(p kubernetesObject) bool {
				return p.Spec.PodSelector.selects(t, ends[name].pod) && slices.Contains(p.Spec.PolicyTypes, direction)
			}) {
				t.Errorf("no policy selects %s for %s", name, direction)
			}
		}
	}
}
