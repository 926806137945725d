// Package kubesim simulates the list and watch protocol of a Kubernetes API server for tests. The server stores given
// objects. It has no validation and no access control.
//
//	s := kubesim.Start()
//	defer s.Close()
//	s.Put("/api/v1/namespaces/default/pods", object)
//
// Every change has a resource version. A list has pages. A watch starts at a version and sends the later changes and a
// bookmark. A watch from before the last call of Compact ends with 410 Gone.
package kubesim

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Object is an object of the API. "metadata" must have a name.
type Object = map[string]any

type event struct {
	version    int
	collection string
	kind       string
	object     Object
}

// Server is a simulated API server. All methods are safe for concurrent use.
type Server struct {
	URL  string
	Page int // objects of a page of a list; 0: the client's limit

	http *httptest.Server

	mu      sync.Mutex
	version int
	oldest  int                          // first version for a watch
	objects map[string]map[string]Object // by collection and name
	events  []event
	changed chan struct{} // closed and replaced at every change
	lists   int
	down    bool
}

// Start starts a server on a port of the system.
func Start() *Server {
	s := &Server{version: 1, objects: map[string]map[string]Object{}, changed: make(chan struct{})}
	s.http = httptest.NewServer(s)
	s.URL = s.http.URL
	return s
}

// Close ends the server and all watches.
func (s *Server) Close() {
	s.http.CloseClientConnections()
	s.http.Close()
}

func metadata(o Object) Object { return o["metadata"].(Object) }

// Put stores an object in a collection, which is a path such as /api/v1/namespaces/default/pods. A new object without a
// UID gets a UID.
func (s *Server) Put(collection string, o Object) Object {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.put(collection, o)
}

func (s *Server) put(collection string, o Object) Object {
	s.version++
	m := maps.Clone(metadata(o))
	name := m["name"].(string)
	of := s.objects[collection]
	if of == nil {
		of = map[string]Object{}
		s.objects[collection] = of
	}
	old, there := of[name]
	if m["uid"] == nil && there {
		m["uid"] = metadata(old)["uid"]
	} else if m["uid"] == nil {
		m["uid"] = fmt.Sprintf("uid-%d", s.version)
	}
	m["resourceVersion"] = strconv.Itoa(s.version)
	o = maps.Clone(o)
	o["metadata"] = m
	of[name] = o
	kind := "ADDED"
	if there {
		kind = "MODIFIED"
	}
	s.happened(collection, kind, o)
	return o
}

func (s *Server) happened(collection, kind string, o Object) {
	s.events = append(s.events, event{s.version, collection, kind, o})
	close(s.changed)
	s.changed = make(chan struct{})
}

// Delete deletes an object, if present.
func (s *Server) Delete(collection, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o, there := s.objects[collection][name]; there {
		s.version++
		o = maps.Clone(o)
		m := maps.Clone(metadata(o))
		m["resourceVersion"] = strconv.Itoa(s.version)
		o["metadata"] = m
		delete(s.objects[collection], name)
		s.happened(collection, "DELETED", o)
	}
}

// Compact deletes the history of changes and ends all watches. A watch from an earlier version then gets 410 Gone.
func (s *Server) Compact() {
	s.mu.Lock()
	s.version++
	s.oldest, s.events = s.version, nil
	s.mu.Unlock()
	s.http.CloseClientConnections()
}

// Down makes all requests fail until Down(false), and ends all watches.
func (s *Server) Down(down bool) {
	s.mu.Lock()
	s.down = down
	s.mu.Unlock()
	s.http.CloseClientConnections()
}

// Lists returns the number of started lists.
func (s *Server) Lists() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lists
}

// Names returns the names of the objects of a collection, sorted.
func (s *Server) Names(collection string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.objects[collection]))
}

func fail(w http.ResponseWriter, code int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(Object{"kind": "Status", "code": code, "message": message})
}

// ServeHTTP answers a request as an API server does.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	down := s.down
	s.mu.Unlock()
	query, collection := r.URL.Query(), r.URL.Path
	switch {
	case down:
		fail(w, http.StatusServiceUnavailable, "etcd is away")
	case r.Method == http.MethodGet && query.Get("watch") != "":
		s.watch(w, r)
	case r.Method == http.MethodGet && isCollection(collection):
		s.list(w, collection, query.Get("labelSelector"), query.Get("limit"), query.Get("continue"))
	default:
		s.one(w, r)
	}
}

// isCollection reports whether a path names a collection: the last word is the plural of a kind.
func isCollection(p string) bool {
	return strings.HasSuffix(p, "s") && path.Base(path.Dir(p)) != "inferencepools"
}

// one reads or changes a single object.
func (s *Server) one(w http.ResponseWriter, r *http.Request) {
	var o Object
	if r.Method == http.MethodPost || r.Method == http.MethodPut {
		if err := json.NewDecoder(r.Body).Decode(&o); err != nil {
			fail(w, http.StatusBadRequest, err.Error())
			return
		}
	}
	collection, name := path.Split(r.URL.Path)
	collection = strings.TrimSuffix(collection, "/")
	if r.Method == http.MethodPost {
		collection, name = r.URL.Path, metadata(o)["name"].(string)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	old, there := s.objects[collection][name]
	switch {
	case r.Method == http.MethodPost && there:
		fail(w, http.StatusConflict, "already exists")
		return
	case r.Method != http.MethodPost && !there:
		fail(w, http.StatusNotFound, "not found")
		return
	case r.Method == http.MethodPut && metadata(o)["resourceVersion"] != metadata(old)["resourceVersion"]:
		fail(w, http.StatusConflict, "the object has been modified")
		return
	case r.Method == http.MethodPut, r.Method == http.MethodPost:
		old = s.put(collection, o)
	case r.Method == http.MethodDelete:
		s.version++
		delete(s.objects[collection], name)
		s.happened(collection, "DELETED", old)
	}
	_ = json.NewEncoder(w).Encode(old)
}

func (s *Server) list(w http.ResponseWriter, collection, selector, limit, from string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	most, _ := strconv.Atoi(limit)
	if s.Page > 0 {
		most = s.Page
	}
	if from == "" {
		s.lists++
	}
	items, next := []Object{}, ""
	for _, name := range slices.Sorted(maps.Keys(s.objects[collection])) {
		o := s.objects[collection][name]
		if name < from || !selected(o, selector) {
			continue
		}
		if most > 0 && len(items) == most {
			next = name
			break
		}
		items = append(items, o)
	}
	_ = json.NewEncoder(w).Encode(Object{"items": items,
		"metadata": Object{"resourceVersion": strconv.Itoa(s.version), "continue": next}})
}

// selected reports whether an object has the labels of a selector NAME=VALUE,...
func selected(o Object, selector string) bool {
	labels, _ := metadata(o)["labels"].(Object)
	for pair := range strings.SplitSeq(selector, ",") {
		if name, value, ok := strings.Cut(pair, "="); ok && labels[name] != value {
			return false
		}
	}
	return true
}

func (s *Server) watch(w http.ResponseWriter, r *http.Request) {
	from, err := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	if err != nil {
		fail(w, http.StatusBadRequest, err.Error())
		return
	}
	out := json.NewEncoder(w)
	for {
		s.mu.Lock()
		if from < s.oldest {
			s.mu.Unlock()
			_ = out.Encode(Object{"type": "ERROR", "object": Object{"kind": "Status", "code": http.StatusGone,
				"message": "too old resource version"}})
			return
		}
		var list []event
		for _, e := range s.events {
			if e.version > from && e.collection == r.URL.Path && selected(e.object, r.URL.Query().Get("labelSelector")) {
				list = append(list, e)
			}
		}
		from = s.version
		changed := s.changed
		s.mu.Unlock()
		for _, e := range list {
			_ = out.Encode(Object{"type": e.kind, "object": e.object})
		}
		_ = out.Encode(Object{"type": "BOOKMARK", "object": Object{"metadata": Object{
			"resourceVersion": strconv.Itoa(from)}}})
		w.(http.Flusher).Flush()
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}
