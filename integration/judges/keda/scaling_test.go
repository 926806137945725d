package keda

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	kedav1alpha1 "github.com/kedacore/keda/v2/apis/keda/v1alpha1"
	"github.com/kedacore/keda/v2/pkg/scalers"
	"github.com/kedacore/keda/v2/pkg/scalers/authentication"
	"github.com/kedacore/keda/v2/pkg/scaling"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/yaml"
)

const (
	root      = "../../.."
	namespace = "inference"

	service     = "http://kvatlas-indexer.inference.svc:8090"
	readToken   = "read-0123456789abcdef"
	writeToken  = "write-0123456789abcdef"
	targetValue = 30_000
)

// TestScaling compares the metric of KEDA with the waiting tokens of an indexer at three loads.
func TestScaling(t *testing.T) {
	program := build(t)
	for _, c := range []struct {
		name, model string
		token       bool
	}{
		{"the model of the page", "llama", true},
		{"an escaped model", "meta-llama/Llama 3+a&b=c", true},
		{"no tokens", "llama", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := startIndexer(t, program, c.token)
			scaler := page(t).scaler(t, x.address, c.model, c.token)
			spec := scaler.GetMetricSpecForScaling(t.Context())
			if len(spec) != 1 || spec[0].External.Target.Type != autoscalingv2.AverageValueMetricType ||
				spec[0].External.Target.AverageValue.Value() != targetValue {
				t.Fatalf("the autoscaler gets %+v", spec)
			}
			check := func(tokens int64) {
				t.Helper()
				list, active, err := scaler.GetMetricsAndActivity(t.Context(), spec[0].External.Metric.Name)
				if err != nil || len(list) != 1 || list[0].Value.Value() != tokens || active != (tokens > 0) {
					t.Errorf("%d tokens wait, and KEDA has %+v, active: %t, %v", tokens, list, active, err)
				}
			}
			x.post("/v1/workers", map[string]any{"instance": "w", "model": c.model, "block_size": 16, "events": "none"})
			check(0)
			x.book(c.model, "a", 4_000)
			check(4_000)
			x.book(c.model, "b", 90_000)
			check(94_000)
			x.post("/v1/prefill_complete", map[string]any{"model": c.model, "request_id": "b"})
			check(4_000)
			x.post("/v1/prefill_complete", map[string]any{"model": c.model, "request_id": "a"})
			check(0)
		})
	}
}

// TestWrong checks that KEDA has an error, and no value, for a wrong token and for a model without workers. KEDA keeps
// the replicas then.
func TestWrong(t *testing.T) {
	x := startIndexer(t, build(t), true)
	objects := page(t)
	objects.secret = "another-0123456789abcdef"
	for what, scaler := range map[string]scalers.Scaler{
		"401": objects.scaler(t, x.address, "llama", true),
		"404": page(t).scaler(t, x.address, "unknown", true),
	} {
		if list, active, err := scaler.GetMetricsAndActivity(t.Context(), "m"); err == nil || active || len(list) > 0 ||
			!strings.Contains(err.Error(), what) {
			t.Errorf("%s: %+v, active: %t, %v", what, list, active, err)
		}
	}
}

// objects are the objects of docs/scaling.md.
type objects struct {
	scaled *kedav1alpha1.ScaledObject
	auth   *kedav1alpha1.TriggerAuthentication
	secret string // the token
}

// block is an indented block of Markdown with objects of KEDA.
var block = regexp.MustCompile(`(?m)^    apiVersion: keda\.sh/v1alpha1\n(?:(?:    .*)?\n)+`)

// page reads the objects of the page. Unknown fields are errors.
func page(t *testing.T) *objects {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "docs/scaling.md"))
	if err != nil {
		t.Fatal(err)
	}
	o := &objects{scaled: &kedav1alpha1.ScaledObject{}, auth: &kedav1alpha1.TriggerAuthentication{}, secret: readToken}
	found := map[string]int{}
	for _, b := range block.FindAllString(string(text), -1) {
		for _, document := range strings.Split(strings.ReplaceAll("\n"+b, "\n    ", "\n"), "\n---\n") {
			var kind metav1.TypeMeta
			if err := yaml.Unmarshal([]byte(document), &kind); err != nil {
				t.Fatal(err)
			}
			var into any = o.scaled
			if kind.Kind == "TriggerAuthentication" {
				into = o.auth
			}
			if err := yaml.UnmarshalStrict([]byte(document), into); err != nil {
				t.Fatalf("%v\n%s", err, document)
			}
			found[kind.Kind]++
		}
	}
	if len(found) != 2 || found["ScaledObject"] != 1 || found["TriggerAuthentication"] != 1 {
		t.Fatalf("docs/scaling.md has %v", found)
	}
	return o
}

// scaler returns the scaler that KEDA builds from the objects. The URL gets the address of the test's indexer in place
// of the service, and the model in place of the page's. Without a token, the objects have no authentication.
func (o *objects) scaler(t *testing.T, address, model string, token bool) scalers.Scaler {
	t.Helper()
	o.scaled.Namespace, o.auth.Namespace = namespace, namespace
	o.scaled.Status.ScaleTargetGVKR = &kedav1alpha1.GroupVersionKindResource{Group: "apps", Version: "v1",
		Kind: "Deployment", Resource: "deployments"}
	if len(o.scaled.Spec.Triggers) != 1 || len(o.auth.Spec.SecretTargetRef) != 1 {
		t.Fatalf("the page has %+v and %+v", o.scaled.Spec, o.auth.Spec)
	}
	trigger := &o.scaled.Spec.Triggers[0]
	path, ok := strings.CutPrefix(trigger.Metadata["url"], service)
	if !ok || !strings.HasSuffix(path, "model=llama") {
		t.Fatalf("the URL of the page is %s", trigger.Metadata["url"])
	}
	trigger.Metadata["url"] = "http://" + address + strings.TrimSuffix(path, "llama") + url.QueryEscape(model)
	if !token {
		delete(trigger.Metadata, "authMode")
		trigger.AuthenticationRef = nil
	}
	ref := o.auth.Spec.SecretTargetRef[0]
	stored := []client.Object{o.scaled, o.auth,
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: ref.Name, Namespace: namespace},
			Data: map[string][]byte{ref.Key: []byte(o.secret)}},
		&appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: o.scaled.Spec.ScaleTargetRef.Name, Namespace: namespace}}}
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{kedav1alpha1.AddToScheme, corev1.AddToScheme, appsv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	store := fake.NewClientBuilder().WithScheme(scheme).WithObjects(stored...).Build()
	handler := scaling.NewScaleHandler(store, nil, scheme, time.Minute, time.Minute, events.NewFakeRecorder(100),
		&authentication.AuthClientSet{})
	cache, err := handler.GetScalersCache(t.Context(), o.scaled)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cache.Close(context.Background()) })
	list, _ := cache.GetScalers()
	if len(list) != 1 {
		t.Fatalf("KEDA built %d scalers", len(list))
	}
	return list[0]
}

// build builds the indexer.
func build(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "indexer")
	cmd := exec.Command("go", "build", "-buildvcs=false", "-o", program, "./cmd/indexer")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return program
}

type indexer struct {
	t       *testing.T
	address string // of HTTP
	token   bool
}

// startIndexer starts an indexer, which requires tokens if token is true, and waits until it is ready.
func startIndexer(t *testing.T, program string, token bool) *indexer {
	t.Helper()
	args := []string{"serve", "--data", t.TempDir(), "--nats-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"}
	if token {
		tokens := filepath.Join(t.TempDir(), "tokens")
		text := fmt.Sprintf("read %s\nregister,route %s\n", readToken, writeToken)
		if err := os.WriteFile(tokens, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--http-token-file", tokens)
	}
	cmd := exec.Command(program, args...)
	out, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
		_ = cmd.Wait()
	})
	x := &indexer{t: t, token: token}
	served, ready, said := regexp.MustCompile(`HTTP is served" listen=(\S+)`), make(chan string), bytes.Buffer{}
	go func() {
		defer close(ended)
		address := ""
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if m := served.FindStringSubmatch(lines.Text()); m != nil {
				address = m[1]
			}
			if ready == nil {
				continue
			}
			said.WriteString(lines.Text() + "\n")
			if strings.Contains(lines.Text(), "msg=ready") {
				ready <- address
				ready = nil
			}
		}
		if ready != nil {
			close(ready)
		}
	}()
	if x.address = <-ready; x.address == "" {
		t.Fatalf("the indexer ended:\n%s", said.String())
	}
	return x
}

// book books a request with the given number of uncached tokens.
func (x *indexer) book(model, id string, tokens int) {
	x.t.Helper()
	prompt := make([]int, tokens)
	for i := range prompt {
		prompt[i] = 1_000_000*int(id[0]) + i
	}
	x.post("/v1/select", map[string]any{"model": model, "tokens": prompt, "request_id": id, "book": true})
}

func (x *indexer) post(path string, body any) {
	x.t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		x.t.Fatal(err)
	}
	r, err := http.NewRequest("POST", "http://"+x.address+path, bytes.NewReader(text))
	if err != nil {
		x.t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	if x.token {
		r.Header.Set("Authorization", "Bearer "+writeToken)
	}
	reply, err := http.DefaultClient.Do(r)
	if err != nil {
		x.t.Fatal(err)
	}
	defer reply.Body.Close()
	if text, err = io.ReadAll(reply.Body); err != nil || reply.StatusCode != 200 {
		x.t.Fatalf("%s: %d %s, %v", path, reply.StatusCode, text, err)
	}
}
