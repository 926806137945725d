package externalmetrics

import "strconv"

const (
	group        = "external.metrics.k8s.io"
	version      = "v1beta1"
	groupVersion = group + "/" + version
	listKind     = "ExternalMetricValueList"
)

// meta is the metadata of an object. It is empty, because the objects are not stored.
type meta struct{}

// typed names the type of an object.
type typed struct {
	Kind       string `json:"kind,omitempty"`
	APIVersion string `json:"apiVersion,omitempty"`
}

type groupVersionName struct {
	GroupVersion string `json:"groupVersion"`
	Version      string `json:"version"`
}

type apiGroup struct {
	typed
	Name      string             `json:"name"`
	Versions  []groupVersionName `json:"versions"`
	Preferred groupVersionName   `json:"preferredVersion"`
}

type apiGroupList struct {
	typed
	Groups []apiGroup `json:"groups"`
}

type apiResource struct {
	Name         string   `json:"name"`
	SingularName string   `json:"singularName"`
	Namespaced   bool     `json:"namespaced"`
	Kind         string   `json:"kind"`
	Verbs        []string `json:"verbs"`
}

type apiResourceList struct {
	typed
	GroupVersion string        `json:"groupVersion"`
	Resources    []apiResource `json:"resources"`
}

type value struct {
	typed
	MetricName   string            `json:"metricName"`
	MetricLabels map[string]string `json:"metricLabels"`
	Timestamp    string            `json:"timestamp"`
	Value        string            `json:"value"`
}

type valueList struct {
	typed
	Metadata meta    `json:"metadata"`
	Items    []value `json:"items"`
}

type statusDetails struct {
	RetryAfterSeconds int `json:"retryAfterSeconds"`
}

type status struct {
	typed
	Metadata meta           `json:"metadata"`
	Status   string         `json:"status"`
	Message  string         `json:"message"`
	Reason   string         `json:"reason"`
	Details  *statusDetails `json:"details,omitempty"`
	Code     int            `json:"code"`
}

// ourGroup returns the description of the group, with a type or without a type in a list.
func ourGroup(of typed) apiGroup {
	name := groupVersionName{groupVersion, version}
	return apiGroup{of, group, []groupVersionName{name}, name}
}

// ourResources returns the list of the metrics.
func ourResources() apiResourceList {
	list := apiResourceList{typed: typed{"APIResourceList", "v1"}, GroupVersion: groupVersion}
	for _, m := range metrics {
		list.Resources = append(list.Resources,
			apiResource{Name: m.name, Namespaced: true, Kind: listKind, Verbs: []string{"get"}})
	}
	return list
}

// quantity returns a number as a quantity of Kubernetes in the canonical form: with the largest suffix that leaves a
// whole number.
func quantity(n uint64) string {
	suffix := ""
	for _, next := range []string{"k", "M", "G", "T", "P", "E"} {
		if n == 0 || n%1000 != 0 {
			break
		}
		n, suffix = n/1000, next
	}
	return strconv.FormatUint(n, 10) + suffix
}
