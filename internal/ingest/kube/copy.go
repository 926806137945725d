package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// Meta contains the decoded fields of an object's metadata.
type Meta struct {
	Name              string `json:"name,omitempty"`
	Namespace         string `json:"namespace,omitempty"`
	UID               string `json:"uid,omitempty"`
	ResourceVersion   string `json:"resourceVersion,omitempty"`
	DeletionTimestamp string `json:"deletionTimestamp,omitempty"` // empty unless the object is about to be deleted
}

// Object is a type that is decoded from an API object.
type Object interface{ Metadata() *Meta }

// Collection is a collection of objects.
type Collection struct {
	Path     string // such as /api/v1/namespaces/default/pods
	Selector string // label selector; empty selects all
}

// Pods returns the collection of a namespace's pods with the labels. An empty namespace means all namespaces.
func Pods(namespace, selector string) Collection {
	if namespace == "" {
		return Collection{"/api/v1/pods", selector}
	}
	return Collection{"/api/v1/namespaces/" + url.PathEscape(namespace) + "/pods", selector}
}

// Pod contains the decoded fields of a pod.
type Pod struct {
	Meta struct {
		Meta
		Labels struct {
			Role string `json:"llm-d.ai/role"`
		} `json:"labels"`
		Annotations struct {
			BootstrapPort string `json:"sglang.ai/bootstrap-port"`
		} `json:"annotations"`
	} `json:"metadata"`
	Status struct {
		Phase string `json:"phase"`
		PodIP string `json:"podIP"`
	} `json:"status"`
}

// Metadata returns the pod's metadata.
func (p Pod) Metadata() *Meta { return &p.Meta.Meta }

// Runs reports whether the pod is in the phase Running, has an address and is not being deleted. Readiness does not
// count.
func (p Pod) Runs() bool {
	return p.Status.Phase == "Running" && p.Status.PodIP != "" && p.Meta.DeletionTimestamp == ""
}

const (
	pageObjects = 500
	watchFor    = 5 * time.Minute
	firstPause  = 500 * time.Millisecond
	longestWait = 30 * time.Second
)

// ErrNotListed is returned by [Copy.List] until the API server has answered for the first time.
var ErrNotListed = errors.New("the API server has not answered yet")

// Copy is a copy of a collection. List is safe for concurrent use.
type Copy[T Object] struct {
	client     *Client
	collection Collection
	failed     func(error)

	mu      sync.Mutex
	listed  bool
	objects map[string]T // by UID
	changed chan struct{}
}

// NewCopy returns a copy that is empty until Run runs. failed is called after each failure, from Run's goroutine. nil
// disables it.
func NewCopy[T Object](client *Client, collection Collection, failed func(error)) *Copy[T] {
	if failed == nil {
		failed = func(error) {}
	}
	return &Copy[T]{client: client, collection: collection, failed: failed, objects: map[string]T{},
		changed: make(chan struct{}, 1)}
}

// List returns the objects, sorted by namespace and name. The error is [ErrNotListed] or nil: failures of the API
// server do not empty a copy.
func (c *Copy[T]) List() ([]T, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.listed {
		return nil, ErrNotListed
	}
	return slices.SortedFunc(maps.Values(c.objects), func(a, b T) int {
		return cmpNames(a.Metadata(), b.Metadata())
	}), nil
}

func cmpNames(a, b *Meta) int {
	return slices.Compare([]string{a.Namespace, a.Name, a.UID}, []string{b.Namespace, b.Name, b.UID})
}

// Changed returns a channel that receives a value after changes. Only one goroutine may receive.
func (c *Copy[T]) Changed() <-chan struct{} { return c.changed }

func (c *Copy[T]) notify() {
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

// Run updates the copy until ctx is done.
func (c *Copy[T]) Run(ctx context.Context) {
	version := ""
	for retry := (loop.Backoff{Min: firstPause, Max: longestWait}); ctx.Err() == nil; {
		var err error
		if version == "" {
			version, err = c.list(ctx)
		}
		if err == nil {
			begun := time.Now()
			if version, err = c.watch(ctx, version); time.Since(begun) > longestWait {
				retry.Reset()
			}
		}
		switch {
		case ctx.Err() != nil:
			return
		case err == nil || is(err, http.StatusGone): // the watch has ended, or a new list is due
			err = nil
		default:
			c.failed(err)
		}
		if err == nil {
			retry.Reset()
		}
		if !retry.Wait(ctx) {
			return
		}
	}
}

// list reads the whole collection. version is empty after an error.
func (c *Copy[T]) list(ctx context.Context) (version string, err error) {
	query := url.Values{"limit": {strconv.Itoa(pageObjects)}}
	if c.collection.Selector != "" {
		query.Set("labelSelector", c.collection.Selector)
	}
	objects := map[string]T{}
	for {
		var page struct {
			Metadata struct {
				ResourceVersion string `json:"resourceVersion"`
				Continue        string `json:"continue"`
			} `json:"metadata"`
			Items []T `json:"items"`
		}
		if err := c.client.call(ctx, http.MethodGet, c.collection.Path, query, nil, &page); err != nil {
			return "", err
		}
		for _, o := range page.Items {
			objects[o.Metadata().UID] = o
		}
		if version = page.Metadata.ResourceVersion; page.Metadata.Continue == "" {
			break
		}
		query.Set("continue", page.Metadata.Continue)
	}
	c.mu.Lock()
	c.objects, c.listed = objects, true
	c.mu.Unlock()
	c.notify()
	return version, nil
}

// watch applies the changes after a version, until the watch ends. It returns the version up to which the copy is
// complete. The version is empty if a new list is needed.
func (c *Copy[T]) watch(ctx context.Context, version string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, watchFor+longestWait)
	defer cancel()
	query := url.Values{"watch": {"1"}, "allowWatchBookmarks": {"true"}, "resourceVersion": {version},
		"timeoutSeconds": {strconv.Itoa(int(watchFor.Seconds()))}}
	if c.collection.Selector != "" {
		query.Set("labelSelector", c.collection.Selector)
	}
	answer, err := c.client.do(ctx, http.MethodGet, c.collection.Path, query, nil)
	if err != nil {
		if is(err, http.StatusGone) {
			version = ""
		}
		return version, err
	}
	defer answer.Body.Close()
	limit := &io.LimitedReader{R: answer.Body}
	for in := json.NewDecoder(limit); ; {
		var event struct {
			Type   string
			Object json.RawMessage
		}
		limit.N = maxObject
		if err := in.Decode(&event); err != nil {
			if limit.N == 0 {
				return "", fmt.Errorf("an object of more than %d bytes", maxObject)
			}
			return version, nil // the API server ends each watch after a while
		}
		if event.Type == "ERROR" {
			var status struct {
				Code    int
				Message string
			}
			if err := strictjson.Unmarshal(event.Object, &status); err != nil {
				return "", err
			}
			return "", &StatusError{status.Code, status.Message}
		}
		var o T
		if err := strictjson.Unmarshal(event.Object, &o); err != nil {
			return "", err
		}
		version = o.Metadata().ResourceVersion
		c.mu.Lock()
		switch event.Type {
		case "ADDED", "MODIFIED":
			c.objects[o.Metadata().UID] = o
		case "DELETED":
			delete(c.objects, o.Metadata().UID)
		}
		c.mu.Unlock()
		if event.Type != "BOOKMARK" {
			c.notify()
		}
	}
}
