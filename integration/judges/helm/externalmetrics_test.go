package helm

import (
	"bytes"
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// externalMetricValue and externalMetricValueList have the fields of the types in k8s.io/metrics, which is no
// dependency of this module.
type externalMetricValue struct {
	metav1.TypeMeta `json:",inline"`
	MetricName      string            `json:"metricName"`
	MetricLabels    map[string]string `json:"metricLabels"`
	Timestamp       metav1.Time       `json:"timestamp"`
	WindowSeconds   *int64            `json:"window,omitempty"`
	Value           resource.Quantity `json:"value"`
}

type externalMetricValueList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []externalMetricValue `json:"items"`
}

// TestExternalMetrics compares the files of internal/faces/externalmetrics/testdata with the encoding of Kubernetes'
// types. With -update it writes the files.
func TestExternalMetrics(t *testing.T) {
	const group, version = "external.metrics.k8s.io", "v1beta1"
	name := metav1.GroupVersionForDiscovery{GroupVersion: group + "/" + version, Version: version}
	ours := metav1.APIGroup{Name: group, Versions: []metav1.GroupVersionForDiscovery{name}, PreferredVersion: name}
	typed := ours
	typed.TypeMeta = metav1.TypeMeta{Kind: "APIGroup", APIVersion: "v1"}
	resources := metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"},
		GroupVersion: name.GroupVersion}
	for _, metric := range []string{"kvatlas-queued-requests", "kvatlas-queued-uncached-tokens",
		"kvatlas-waiting-uncached-tokens"} {
		resources.APIResources = append(resources.APIResources, metav1.APIResource{Name: metric, Namespaced: true,
			Kind: "ExternalMetricValueList", Verbs: metav1.Verbs{"get"}})
	}
	values := externalMetricValueList{TypeMeta: metav1.TypeMeta{Kind: "ExternalMetricValueList",
		APIVersion: name.GroupVersion}}
	for _, m := range []struct {
		model  string
		tokens int64
	}{{"llama", 84500}, {"meta-llama_Llama3", 30000}} {
		values.Items = append(values.Items, externalMetricValue{MetricName: "kvatlas-waiting-uncached-tokens",
			MetricLabels: map[string]string{"model": m.model}, Timestamp: metav1.NewTime(time.Unix(1_800_000_000, 5)),
			Value: *resource.NewQuantity(m.tokens, resource.DecimalSI)})
	}
	for file, object := range map[string]any{
		"apis.json": metav1.APIGroupList{TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"},
			Groups: []metav1.APIGroup{ours}},
		"group.json": typed, "resources.json": resources, "values.json": values,
		"status.json": metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
			Status: metav1.StatusFailure, Reason: metav1.StatusReasonServiceUnavailable, Code: 503,
			Message: `the nodes ["n2"] have not answered, so the sum of model "m" is incomplete`,
			Details: &metav1.StatusDetails{RetryAfterSeconds: 1}},
		"quantities.json": quantities(), "selectors.json": selectors(),
	} {
		text, err := json.Marshal(object)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(root, "internal/faces/externalmetrics/testdata", file)
		if text = append(text, '\n'); *update {
			if err := os.WriteFile(path, text, 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if is, err := os.ReadFile(path); err != nil || !bytes.Equal(is, text) {
			t.Errorf("%s: %v\n%s\nwant %s", file, err, is, text)
		}
	}
}

type quantityVector struct {
	Number int64
	Text   string
}

// quantities returns numbers with their canonical quantities.
func quantities() (list []quantityVector) {
	rng := rand.New(rand.NewPCG(1, 1))
	numbers := []int64{0, 1, 999, 1000, 1001, 84500, 30000, 1_000_000, 1_500_000, 5e18, math.MaxInt64}
	for range 100 {
		n := rng.Int64N(1000)
		for range rng.IntN(6) {
			n *= []int64{1, 10, 1000}[rng.IntN(3)]
		}
		numbers = append(numbers, n)
	}
	for _, n := range numbers {
		list = append(list, quantityVector{n, resource.NewQuantity(n, resource.DecimalSI).String()})
	}
	return list
}

type selectorVectors struct {
	Labels    []map[string]string
	Selectors []selectorVector
}

type selectorVector struct {
	Selector string
	Invalid  bool
	Matches  []bool `json:",omitempty"`
}

// selectors returns random selectors with their verdicts. Selectors with > and < are left out, because
// externalmetrics does not support them.
func selectors() selectorVectors {
	of := selectorVectors{Labels: []map[string]string{{}, {"model": "llama"}, {"model": ""}, {"model": "a"},
		{"model": "llama", "x/tier": "b"}}}
	rng := rand.New(rand.NewPCG(2, 2))
	words := []string{"model", "model", "llama", "x/tier", "a", "b", "in", "notin", "=", "==", "!=", "!", "(", ")", ",",
		" ", "-", "a/b/c", "é", strings.Repeat("a", 64), "  ", "in (", ", model"}
	forms := []string{"model=llama", "model == a", "model!=llama", "model in (llama,b)", "model notin (llama, b)", "model",
		"!model", "x/tier=b", "model=", "model in ()", "model in (,)", "model in (a,", "=", "model=a,", ",model", "model=!a",
		"!model=a", "in in (in)", "notin", "model in a", "model (a)", "X_/a=b", "-a", "a=-", "model = llama , !x/tier"}
	for range 400 {
		text := ""
		for range 1 + rng.IntN(7) {
			text += words[rng.IntN(len(words))]
		}
		forms = append(forms, text)
		valid := forms[rng.IntN(9)] + "," + forms[rng.IntN(9)]
		forms = append(forms, valid)
	}
	for _, text := range forms {
		v := selectorVector{Selector: text}
		s, err := labels.Parse(text)
		v.Invalid = err != nil
		for _, l := range of.Labels {
			if err == nil {
				v.Matches = append(v.Matches, s.Matches(labels.Set(l)))
			}
		}
		of.Selectors = append(of.Selectors, v)
	}
	return of
}
