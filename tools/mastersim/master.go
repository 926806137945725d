// Package mastersim is a Mooncake master that holds names of objects and no objects: what does the HTTP side of a
// master say of them?
//
// [Start] one, [Master.Put] names, and ask it as one asks a real one: /batch_query_keys, /get_all_keys, /health, in the
// words of mooncake-store/src/master_admin_service.cpp of kvcache-ai/Mooncake. [Master.Publish] adds the event stream,
// which published wheels leave out. The demonstration runs on it where no real master is at hand, and unit tests make
// it ill with [Master.Fault]. A test in integration/judges/mooncake holds it to a real master's answers.
//
// All methods may be called from any goroutine.
package mastersim

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// Fault takes the place of an answer about keys; it reports whether it has answered.
type Fault func(w http.ResponseWriter, keys []string) bool

// Master is a running master.
type Master struct {
	listener net.Listener
	server   *http.Server

	mu      sync.Mutex
	objects map[string]bool
	role    string
	asked   []int
	fault   Fault
	conns   map[net.Conn]bool
	dialled int
	events  publisher
}

// Start starts a master that listens on HOST:PORT.
func Start(addr string) (*Master, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("built-in Mooncake master: %w", err)
	}
	m := &Master{listener: l, objects: map[string]bool{}, role: "leader", conns: map[net.Conn]bool{}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", m.health)
	mux.HandleFunc("GET /batch_query_keys", m.batchQueryKeys)
	mux.HandleFunc("GET /get_all_keys", m.getAllKeys)
	mux.HandleFunc("GET /kv_events/status", m.eventStatus)
	m.server = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, MaxHeaderBytes: 16 << 20,
		ConnState: m.connState}
	go m.server.Serve(l)
	return m, nil
}

// Addr is HOST:PORT.
func (m *Master) Addr() string { return m.listener.Addr().String() }

// Stop ends the master and its connections.
func (m *Master) Stop() {
	m.Unpublish()
	m.server.Close()
}

// Put stores objects.
func (m *Master) Put(keys ...string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, key := range keys {
		m.objects[key] = true
	}
	m.changed("stored", "BlockStored", keys)
}

// Remove removes objects.
func (m *Master) Remove(keys ...string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, key := range keys {
		delete(m.objects, key)
	}
	m.changed("removed", "BlockRemoved", keys)
}

// Has reports whether there is an object.
func (m *Master) Has(key string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.objects[key]
}

// SetRole makes the master a "leader" or a "standby", which does not serve.
func (m *Master) SetRole(role string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.role = role
}

// Fault makes the master ill until it is called with nil.
func (m *Master) Fault(fault Fault) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fault = fault
}

// Asked lists, for each question about keys so far, how many they were.
func (m *Master) Asked() []int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.asked)
}

// Dialled is how many connections there have been.
func (m *Master) Dialled() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.dialled
}

// Drop breaks every connection, as a restart does.
func (m *Master) Drop() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for c := range m.conns {
		c.Close()
	}
}

func (m *Master) connState(c net.Conn, state http.ConnState) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch state {
	case http.StateNew:
		m.conns[c] = true
		m.dialled++
	case http.StateClosed, http.StateHijacked:
		delete(m.conns, c)
	}
}

// active answers a request for a master that does not serve.
func (m *Master) active(w http.ResponseWriter) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.role != "leader" {
		w.WriteHeader(http.StatusServiceUnavailable)
		fmt.Fprint(w, `{"success":false,"error_code":-1011,"error_message":"service plane is not active"}`)
	}
	return m.role == "leader"
}

func (m *Master) health(w http.ResponseWriter, _ *http.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	fmt.Fprintf(w,
		`{"status":"ok","role":%q,"ha_state":"serving","service_ready":%v,"leader_address":null,"view_version":null}`,
		m.role, m.role == "leader")
}

func (m *Master) getAllKeys(w http.ResponseWriter, _ *http.Request) {
	if !m.active(w) {
		return
	}
	m.mu.Lock()
	keys := slices.Sorted(maps.Keys(m.objects))
	m.mu.Unlock()
	for _, key := range keys {
		fmt.Fprintln(w, key)
	}
}

// entry is what a master says of one key. What there is not is null.
type entry struct {
	OK        bool         `json:"ok"`
	Error     *string      `json:"error"`
	Values    []descriptor `json:"values"`
	Disk      []descriptor `json:"disk_values"`
	LocalDisk []descriptor `json:"local_disk_values"`
	NVMeOF    []descriptor `json:"nof_values"`
}

// descriptor says where an object lies.
type descriptor struct {
	Size     int    `json:"size_"`
	Address  uint64 `json:"buffer_address_"`
	Protocol string `json:"protocol_"`
	Endpoint string `json:"transport_endpoint_"`
}

// errUTF8 is what a real master stumbles over.
var errUTF8 = errors.New("not UTF-8")

// keysOf decodes as a master does: first what is percent-encoded, then the list.
func keysOf(query string) ([]string, error) {
	raw := ""
	for part := range strings.SplitSeq(query, "&") {
		if value, is := strings.CutPrefix(part, "keys="); is {
			raw = value
		}
	}
	text, err := url.QueryUnescape(raw)
	if err == nil && !utf8.ValidString(text) {
		err = errUTF8
	}
	if err != nil || text == "" {
		return nil, err
	}
	return strings.Split(text, ","), nil
}

func (m *Master) batchQueryKeys(w http.ResponseWriter, r *http.Request) {
	if !m.active(w) {
		return
	}
	keys, err := keysOf(r.URL.RawQuery)
	if err != nil {
		http.Error(w, "Service Unavailable", http.StatusServiceUnavailable)
		return
	}
	m.mu.Lock()
	m.asked = append(m.asked, len(keys))
	fault := m.fault
	m.mu.Unlock()
	if fault != nil && fault(w, keys) {
		return
	}
	if len(keys) == 0 {
		w.WriteHeader(http.StatusBadRequest)
		fmt.Fprint(w, `{"success":false,"error":"No keys provided. Use ?keys=key1,key2,..."}`)
		return
	}
	missing := "OBJECT_NOT_FOUND"
	data := make(map[string]entry, len(keys))
	m.mu.Lock()
	for _, key := range keys {
		if m.objects[key] {
			data[key] = entry{OK: true, Values: []descriptor{{Size: 4, Protocol: "tcp", Endpoint: "127.0.0.1:1"}}}
		} else {
			data[key] = entry{Error: &missing}
		}
	}
	m.mu.Unlock()
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	json.NewEncoder(w).Encode(map[string]any{"success": true, "data": data}) // who asked may be gone
}
