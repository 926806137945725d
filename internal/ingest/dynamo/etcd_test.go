package dynamo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/internal/ingest/etcd"
	"github.com/kvatlas/kvatlas/internal/testkit"
)

// etcdServer simulates the part of etcd's gateway that a reader of a prefix uses.
type etcdServer struct {
	t        *testing.T
	password string

	mu       sync.Mutex
	keys     map[string]string
	revision int64
	since    int64           // earlier revisions are compacted
	changes  []change        // by revision from 1 on
	away     bool            // every request fails
	watches  []chan struct{} // woken at each change
	ranges   int
}

// change is a change of a key, as the JSON of an event.
type change struct{ key, event string }

func (s *etcdServer) change(key, value string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revision++
	text, err := json.Marshal(struct{ Key, Value []byte }{[]byte(key), []byte(value)})
	if err != nil {
		s.t.Fatal(err)
	}
	kv := strings.NewReplacer(`"Key"`, `"key"`, `"Value"`, `"value"`).Replace(string(text))
	if value == "" {
		delete(s.keys, key)
		s.changes = append(s.changes, change{key, fmt.Sprintf(`{"type":"DELETE","kv":%s}`, kv)})
	} else {
		s.keys[key] = value
		s.changes = append(s.changes, change{key, fmt.Sprintf(`{"kv":%s}`, kv)})
	}
	s.wake()
}

func (s *etcdServer) wake() {
	for _, w := range s.watches {
		select {
		case w <- struct{}{}:
		default:
		}
	}
}

func (s *etcdServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var q struct {
		Name, Password string
		Key            []byte
		RangeEnd       []byte `json:"range_end"`
		Limit          int
		Revision       int64
		Create         struct {
			Key      []byte
			RangeEnd []byte `json:"range_end"`
			Start    int64  `json:"start_revision"`
		} `json:"create_request"`
	}
	if err := json.NewDecoder(r.Body).Decode(&q); err != nil {
		s.t.Error(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.away:
		http.Error(w, `{"error":"etcdserver: no leader","code":14}`, http.StatusServiceUnavailable)
	case r.URL.Path == "/v3/auth/authenticate":
		if q.Name != "reader" || q.Password != s.password {
			http.Error(w, `{"error":"etcdserver: authentication failed, invalid user ID or password"}`, http.StatusBadRequest)
			return
		}
		fmt.Fprint(w, `{"token":"a token"}`)
	case s.password != "" && r.Header.Get("Authorization") != "a token":
		http.Error(w, `{"error":"etcdserver: user name is empty"}`, http.StatusBadRequest)
	case r.URL.Path == "/v3/kv/range":
		s.ranges++
		if q.Revision > 0 && q.Revision != s.revision {
			http.Error(w, `{"error":"etcdserver: mvcc: required revision has been compacted"}`, http.StatusBadRequest)
			return
		}
		var list []string
		more := false
		for _, key := range slices.Sorted(maps.Keys(s.keys)) {
			if key < string(q.Key) || key >= string(q.RangeEnd) {
				continue
			}
			if more = len(list) == q.Limit; more {
				break
			}
			key, _ := json.Marshal([]byte(key)) // bytes always encode
			value, _ := json.Marshal([]byte(s.keys[string(mustText(key))]))
			list = append(list, fmt.Sprintf(`{"key":%s,"mod_revision":"1","value":%s}`, key, value))
		}
		fmt.Fprintf(w, `{"header":{"cluster_id":"1","revision":"%d"},"kvs":[%s],"more":%v}`, s.revision,
			strings.Join(list, ","), more)
	case r.URL.Path == "/v3/watch":
		s.watch(w, r, q.Create.Start, string(q.Create.Key), string(q.Create.RangeEnd))
	default:
		http.NotFound(w, r)
	}
}

func mustText(quoted []byte) (b []byte) {
	_ = json.Unmarshal(quoted, &b) // the test made the text itself
	return b
}

// watch sends changes of a range of keys. It holds the lock except while it waits.
func (s *etcdServer) watch(w http.ResponseWriter, r *http.Request, from int64, key, end string) {
	woken := make(chan struct{}, 1)
	s.watches = append(s.watches, woken)
	flush := func() { w.(http.Flusher).Flush() }
	fmt.Fprintf(w, `{"result":{"header":{"revision":"%d"},"created":true}}`+"\n", s.revision)
	flush()
	for !s.away {
		if from <= s.since {
			fmt.Fprintf(w, `{"result":{"canceled":true,"compact_revision":"%d"}}`+"\n", s.since)
			return
		}
		for ; from <= s.revision; from++ {
			if c := s.changes[from-1]; c.key >= key && c.key < end {
				fmt.Fprintf(w, `{"result":{"header":{"revision":"%d"},"events":[%s]}}`+"\n", from, c.event)
			}
		}
		flush()
		s.mu.Unlock()
		select {
		case <-woken:
		case <-r.Context().Done():
			s.mu.Lock()
			return
		}
		s.mu.Lock()
	}
	fmt.Fprint(w, `{"result":{"hea`) // the server dies
}

// TestEtcd: the copy equals the keys of etcd, through failures of both.
func TestEtcd(t *testing.T) {
	s := &etcdServer{t: t, keys: map[string]string{}, password: "secret"}
	server := httptest.NewServer(s)
	defer server.Close()
	name := func(kind string, i int) string {
		return fmt.Sprintf("v1/%s/namespace/ns/topic/kv-events/%05d", kind, i)
	}
	channel := func(i int) string {
		return strings.Replace(channelRecord, "2219950695499162", fmt.Sprint(i), 1)
	}
	s.change("v1/instances/ns/1", "{}")
	for i := range 1200 { // more than one page
		s.change(name(channelsKind, i), channel(i))
	}
	e, err := NewEtcd(EtcdConfig{URLs: []string{"http://127.0.0.1:1", server.URL}, User: "reader", Password: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := e.Publishers(); !errors.Is(err, etcd.ErrNotAsked) {
		t.Error(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		e.Run(ctx)
		close(done)
	}()
	until := func(what string, is func(list []Publisher, wrong []error, err error) bool) {
		t.Helper()
		testkit.Eventually(t, what, func() (bool, string) {
			list, wrong, err := e.Publishers()
			return is(list, wrong, err), fmt.Sprintf("%d publishers, %v, %v", len(list), wrong, err)
		})
	}
	many := func(n int) func([]Publisher, []error, error) bool {
		return func(list []Publisher, wrong []error, err error) bool {
			return len(list) == n && len(wrong) == 0 && err == nil
		}
	}
	until("listed", many(1200))
	s.change(name(channelsKind, 7), "")
	until("one less", many(1199))
	s.change(name(channelsKind, 2000), channelRecord)
	s.change(name(sourcesKind, 2000), sourceRecord)
	until("a publisher with a known rank", func(list []Publisher, _ []error, _ error) bool {
		return slices.ContainsFunc(list, func(p Publisher) bool { return p.Known && p.Key.Rank == 1 && p.Indexer != "" })
	})
	s.change(name(channelsKind, 3000), "{")
	until("an unreadable record", func(_ []Publisher, wrong []error, _ error) bool { return len(wrong) == 1 })
	s.change(name(channelsKind, 3000), "")

	// The watch falls behind a compaction and ends. The copy lists all keys again.
	s.mu.Lock()
	delete(s.keys, name(channelsKind, 8)) // no watch reports this deletion
	s.revision, s.changes = s.revision+10, append(s.changes, make([]change, 10)...)
	s.since = s.revision
	s.wake()
	s.mu.Unlock()
	until("after a compaction", many(1199))

	// The server dies and is replaced.
	s.mu.Lock()
	s.away = true
	s.wake()
	s.mu.Unlock()
	until("away", func(_ []Publisher, _ []error, err error) bool {
		return err != nil && strings.Contains(err.Error(), "no leader")
	})
	s.mu.Lock()
	s.away, s.keys, s.revision, s.since, s.changes = false, map[string]string{}, 0, 0, nil
	s.mu.Unlock()
	s.change(name(channelsKind, 1), channel(1))
	until("a new server without the old keys", many(1))
	stop()
	<-done
}

func TestEtcdRefuses(t *testing.T) {
	for _, urls := range [][]string{nil, {"127.0.0.1:2379"}, {"http://"}, {"http://h:1/x"}, {"ftp://h"}, {"http://h:1", ""},
		{"http://u:secret@h:1"}, {"http://h:1", "u:secret@h:1"}, {"http://u:secret@h:%zz"}, {"http://u:secret", "x@h:1"}} {
		_, err := NewEtcd(EtcdConfig{URLs: urls})
		if err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v", urls, err)
		}
	}
	s := &etcdServer{t: t, password: "secret"}
	server := httptest.NewServer(s)
	defer server.Close()
	for _, c := range []struct{ user, password, says string }{
		{"", "", "user name is empty"}, {"reader", "guess", "authentication failed"},
	} {
		e, err := NewEtcd(EtcdConfig{URLs: []string{server.URL}, User: c.user, Password: c.password})
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		if err == nil {
			go func() {
				defer close(done)
				e.Run(ctx)
			}()
			testkit.Eventually(t, "the first request ends", func() bool {
				_, _, err = e.Publishers()
				return !errors.Is(err, etcd.ErrNotAsked)
			})
			stop()
			<-done
		}
		stop()
		if err == nil || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "guess") {
			t.Errorf("%v", err)
		}
	}
}
