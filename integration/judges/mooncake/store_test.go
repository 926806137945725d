//go:build judges

package mooncake

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/ingest/sharedstore"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/tools/mastersim"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// realStore is a real master with a real client, and the indexer's access: a watched store and a cache without expiry.
type realStore struct {
	*pyenv.Mooncake
	t       *testing.T
	ctx     context.Context
	master  *sharedstore.Mooncake
	cache   *hicache.Cache
	changed chan string
}

func startRealStore(t *testing.T) *realStore {
	s := &realStore{Mooncake: pyenv.StartMooncake(t), t: t, changed: make(chan string, 1000)}
	s.StartClient()
	var err error
	s.master, err = sharedstore.NewMooncake(sharedstore.MooncakeConfig{Address: s.HTTP, MaxKeys: 3,
		Check: 20 * time.Millisecond, Changed: func(why string) {
			s.cache.Forget()
			s.changed <- why
		}})
	if err != nil {
		t.Fatal(err)
	}
	s.cache = hicache.NewCache(s.master, hicache.CacheConfig{HitLife: time.Hour, MissLife: time.Hour})
	var cancel context.CancelFunc
	s.ctx, cancel = context.WithTimeout(context.Background(), 4*harness.Patience)
	watched := make(chan struct{})
	go func() { s.master.Watch(s.ctx); close(watched) }()
	t.Cleanup(func() { cancel(); <-watched })
	return s
}

// askAll looks up a whole lane through the cache.
func (s *realStore) askAll(lane hicache.Lane) *hicache.Question {
	q := s.cache.Begin(lane, 0)
	q.Ask(0, lane.Pages)
	return q
}

// exists looks up valid keys and requires an answer for every key.
func (s *realStore) exists(keys ...string) hicache.Bitmap {
	s.t.Helper()
	present, known, err := s.master.Exists(s.ctx, keys)
	if err != nil || known.Count() != len(keys) {
		s.t.Fatalf("%v, %d of %d answered", err, known.Count(), len(keys))
	}
	return present
}

// waitGone polls until no key exists, and returns the time. Before, all or none of the keys exist.
func (s *realStore) waitGone(keys ...string) time.Time {
	s.t.Helper()
	for ; ; time.Sleep(20 * time.Millisecond) {
		present := s.exists(keys...)
		if present.Count() == 0 {
			return time.Now()
		}
		if s.ctx.Err() != nil {
			s.t.Fatalf("%d of %d objects stay", present.Count(), len(keys))
		}
	}
}

// TestRealMooncakeMaster looks up a real client's objects in a real master: hits, misses, odd keys, removal, and the
// end of the client.
func TestRealMooncakeMaster(t *testing.T) {
	t.Parallel()
	s := startRealStore(t)
	odd := []string{"a b", "a+b", "a%2Cb", "pre@m@tp_rank:0/ü|\"\n", "nul\x00", strings.Repeat("long", 500)}
	s.Put(append([]string{"plain"}, odd...)...)
	if _, err := s.master.Health(s.ctx); err != nil {
		t.Fatal(err)
	}
	keys := append([]string{"none", "with,comma", "not\xffutf8", "", "plain"}, odd...)
	present, known, err := s.master.Exists(s.ctx, keys)
	if !errors.Is(err, sharedstore.ErrKey) {
		t.Errorf("invalid keys: %v", err)
	}
	for i, key := range keys {
		if known.Get(i) != (i == 0 || i >= 4) || present.Get(i) != (i >= 4) {
			t.Errorf("%.40q: answered %v, present %v", key, known.Get(i), present.Get(i))
		}
	}

	// The reason for refusing such keys first: with an invalid key the master refuses every key of a batch.
	res, err := http.Get("http://" + s.HTTP + "/batch_query_keys?keys=plain," + url.QueryEscape("not\xffutf8"))
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("the master replies %s to a key with invalid UTF-8: the refusal is no longer necessary", res.Status)
	}

	s.Remove("plain")
	if present := s.exists("plain", "a b"); present.Get(0) || !present.Get(1) {
		t.Errorf("after removal: %b", present)
	}
	s.CloseClient()
	s.waitGone("a b", "a+b")
}

// TestRealMooncakeClientKilled kills the client. The master continues to report the objects until the client's
// heartbeat is overdue.
func TestRealMooncakeClientKilled(t *testing.T) {
	t.Parallel()
	s := startRealStore(t)
	keys := []string{"one", "two", "three"}
	s.Put(keys...)
	s.KillClient()
	killed := time.Now()
	present := s.exists(keys...)
	if soon := time.Since(killed) < 3*time.Second; soon && present.Count() != 3 {
		t.Errorf("%d of 3 objects right after the owner's death; by docs/l3.md the master still reports them",
			present.Count())
	}
	took := s.waitGone(keys...).Sub(killed)
	t.Logf("the master answered for a dead client's objects for %v", took)
	if took < 3*time.Second {
		t.Errorf("the master reported a dead client's objects for only %v; by docs/l3.md ten seconds", took)
	}
}

// TestRealMooncakeEviction checks that exactly the evicted objects are missing.
func TestRealMooncakeEviction(t *testing.T) {
	t.Parallel()
	s := startRealStore(t)
	const size = 1 << 20
	var keys []string
	for i := range 2 * pyenv.ClientMemory / size {
		keys = append(keys, fmt.Sprintf("large-%d", i))
	}
	s.PutLarge(size, keys...)
	// The master evicts in a separate thread: the list and the answer must be of the same moment.
	for {
		before := s.list()
		present := s.exists(keys...)
		if after := s.list(); len(after) != len(before) {
			continue
		}
		for i, key := range keys {
			if present.Get(i) != before[key] {
				t.Fatalf("%s: the answer is %v, the master's list has %v", key, present.Get(i), before[key])
			}
		}
		if n := present.Count(); n == len(keys) || n == 0 {
			t.Fatalf("%d of %d objects are there: nothing was evicted, or all", n, len(keys))
		}
		return
	}
}

// list returns the master's list of objects.
func (s *realStore) list() map[string]bool {
	s.t.Helper()
	res, err := http.Get("http://" + s.HTTP + "/get_all_keys")
	if err != nil {
		s.t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusOK {
		s.t.Fatalf("/get_all_keys: %s, %v", res.Status, err)
	}
	all := map[string]bool{}
	for lines := bufio.NewScanner(strings.NewReader(string(body))); lines.Scan(); {
		all[lines.Text()] = true
	}
	return all
}

// TestRealMooncakeRestart restarts a master, which loses all objects without notice. The broken connection is the only
// sign. The cache must drop its entries at once, regardless of their expiry.
func TestRealMooncakeRestart(t *testing.T) {
	t.Parallel()
	s := startRealStore(t)
	config := hicache.Config{SGLang: &hicache.SGLang{Backend: "mooncake", PageSize: 4, TPSize: 2, PPSize: 1}}
	prompt, err := config.Prompt(harness.Tokens(1, 40), "", "", 4)
	if err != nil {
		t.Fatal(err)
	}
	lane := prompt.Lanes[0]
	objects := lane.Names(0, lane.Pages).Keys
	for remembered := false; !remembered; {
		for len(s.changed) > 0 {
			<-s.changed
		}
		s.Put(objects...)
		there := s.askAll(lane).Wait(s.ctx)
		s.Remove(objects...)
		after := s.askAll(lane).Wait(s.ctx)
		remembered = there.Err == nil && there.Present.Count() == 10 && after.Err == nil && after.Present.Count() == 10
		// otherwise the master was paused and counted as another master: repeat
		if !remembered && len(s.changed) == 0 {
			t.Fatalf("%d of 10 pages, %v; cached are %d, %v", there.Present.Count(), there.Err,
				after.Present.Count(), after.Err)
		}
	}
	s.KillMaster()
	for told := false; !told; {
		select {
		case why := <-s.changed:
			told = strings.Contains(why, "connection")
		case <-s.ctx.Done():
			t.Fatal("no notice of the broken connection")
		}
	}
	if f := s.askAll(lane).Wait(s.ctx); f.Err == nil || f.Known.Count() != 0 {
		t.Errorf("a dead master: %v, %d answered", f.Err, f.Known.Count())
	}
	s.StartMaster()
	for { // Watch detects the restart
		f := s.askAll(lane).Wait(s.ctx)
		if f.Err == nil {
			if f.Known.Count() != 10 || f.Present.Count() != 0 {
				t.Errorf("a restarted master: %d answered, %d present", f.Known.Count(), f.Present.Count())
			}
			return
		}
		if s.ctx.Err() != nil {
			t.Fatal(f.Err)
		}
	}
}

// TestBuiltInMasterSpeaksAsARealOne checks that the built-in master has the replies of a real master, except for the
// location of an object.
func TestBuiltInMasterSpeaksAsARealOne(t *testing.T) {
	t.Parallel()
	s := startRealStore(t)
	built, err := mastersim.Start("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer built.Stop()
	keys := []string{"a", "b c", "d+e", "ü"}
	s.Put(keys...)
	built.Put(keys...)
	type reply struct {
		Status int
		Body   any
	}
	ask := func(addr, path string) (r reply) {
		res, err := http.Get("http://" + addr + path)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		r.Status = res.StatusCode
		if json.Unmarshal(body, &r.Body) != nil && res.StatusCode == http.StatusOK {
			lines := strings.Fields(string(body))
			slices.Sort(lines)
			r.Body = lines
		}
		if m, is := r.Body.(map[string]any); is {
			if data, is := m["data"].(map[string]any); is {
				for _, e := range data {
					if values, is := e.(map[string]any)["values"].([]any); is {
						for _, v := range values {
							for _, where := range []string{"buffer_address_", "transport_endpoint_"} {
								if _, has := v.(map[string]any)[where]; !has {
									t.Errorf("%s%s: a value without %s", addr, path, where)
								}
								delete(v.(map[string]any), where)
							}
						}
					}
				}
			}
		}
		return r
	}
	for _, path := range []string{
		"/health", "/get_all_keys", "/batch_query_keys", "/batch_query_keys?keys=", "/batch_query_keys?keys=a",
		"/batch_query_keys?keys=a,none", "/batch_query_keys?keys=a,",
		"/batch_query_keys?keys=b+c,d%2Be,d+e", "/batch_query_keys?keys=a%2Cnone", "/batch_query_keys?keys=a,a",
		"/batch_query_keys?keys=%C3%BC", "/batch_query_keys?keys=a,%ff%fe", "/nothing",
	} {
		real, ours := ask(s.HTTP, path), ask(built.Addr(), path)
		if real.Status != ours.Status || real.Status != http.StatusServiceUnavailable &&
			real.Status != http.StatusNotFound && !reflect.DeepEqual(real.Body, ours.Body) {
			t.Errorf("%s: the reply of a real master is\n%+v, of the built-in master\n%+v", path, real, ours)
		}
	}
}
