// Package mastersim simulates the HTTP API of a Mooncake master. The master stores names of objects without the
// objects.
//
// [Start] starts a master, and [Master.Put] adds names. The paths /batch_query_keys, /get_all_keys and /health reply as
// mooncake-store/src/master_admin_service.cpp of kvcache-ai/Mooncake does. [Master.Publish] adds the event stream,
// which published wheels lack. The demonstration uses the package without a real master. Unit tests inject faults with
// [Master.Fault]. A test in integration/judges/mooncake compares the replies with a real master.
//
// All methods are safe for concurrent use.
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

// Fault replaces the reply to a request for keys. It reports whether it has sent a reply.
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

// Start starts a master at HOST:PORT.
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

// Stop ends the master and closes the connections.
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

// SetRole makes the master a "leader" or a "standby". A standby serves no requests.
func (m *Master) SetRole(role string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.role = role
}

// Fault injects a fault until a call with nil.
func (m *Master) Fault(fault Fault) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fault = fault
}

// Asked returns the number of keys of every past request.
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

// active sends the reply of a standby. It reports whether the master serves requests.
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

// entry is the reply for a key. Absent values are null.
type entry struct {
	OK        bool         `json:"ok"`
	Error     *string      `json:"error"`
	Values    []descriptor `json:"values"`
	Disk      []descriptor `json:"disk_values"`
	LocalDisk []descriptor `json:"local_disk_values"`
	NVMeOF    []descriptor `json:"nof_values"`
}

// descriptor is the location of an object.
type descriptor struct {
	Size     int    `json:"size_"`
	Address  uint64 `json:"buffer_address_"`
	Protocol string `json:"protocol_"`
	Endpoint string `json:"transport_endpoint_"`
}

// errUTF8 is the error of a real master for invalid UTF-8.
var errUTF8 = errors.New("not UTF-8")

// keysOf decodes a list of keys as a master does: the percent encoding first, then the list.
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
	json.NewEncoder(w).Encode(map[string]any{"success": true, "data": data}) // the client may be gone
}
