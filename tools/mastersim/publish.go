package mastersim

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/tools/zmtpserver"
	"github.com/vmihailenco/msgpack/v5"
)

// publisher is a master's event stream: docs/source/design/kv-event/publisher-design.md of kvcache-ai/Mooncake. Guarded
// by Master.mu.
type publisher struct {
	pub     *zmtpserver.Pub
	number  uint64 // of the last batch
	batches uint64
	events  uint64 // also the last event's id
	lose    int
}

// Publish starts publishing later puts and removals on an endpoint, and returns the address for subscribers. A call of
// [Master.Put] or [Master.Remove] is a batch, or several batches of 64 events.
func (m *Master) Publish(ctx context.Context, endpoint string) (string, error) {
	pub, err := zmtpserver.ListenPub(ctx, endpoint, zmtp.Config{})
	if err != nil {
		return "", fmt.Errorf("built-in Mooncake master: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.events.pub != nil {
		pub.Stop()
		return "", errors.New("built-in Mooncake master: Publish was called twice")
	}
	m.events = publisher{pub: pub}
	return pub.Addr(), nil
}

// Unpublish ends the event stream; another may begin, with numbers from 1 again, as in a new process.
func (m *Master) Unpublish() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.events.pub != nil {
		m.events.pub.Stop()
	}
	m.events = publisher{}
}

// WaitSubscribers waits until n connections have subscribed.
func (m *Master) WaitSubscribers(ctx context.Context, n int) error {
	m.mu.Lock()
	pub := m.events.pub
	m.mu.Unlock()
	return pub.WaitSubscribers(ctx, n)
}

// Lose drops the next n batches, as a full subscriber queue does. Dropped batches keep their sequence numbers and are
// counted.
func (m *Master) Lose(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.events.lose = n
}

// Clear removes all objects.
func (m *Master) Clear() {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.objects)
	m.events.send([]map[string]any{{"event_type": "cleared", "type": "AllBlocksCleared", "medium": nil}})
}

// changed publishes puts or removals of objects. The callers of changed and send hold m.mu.
func (m *Master) changed(kind, legacy string, keys []string) {
	const batch = 64
	for len(keys) > 0 {
		n := min(batch, len(keys))
		list := make([]map[string]any, n)
		for i, key := range keys[:n] {
			list[i] = map[string]any{"event_type": kind, "type": legacy, "medium": "cpu", "object_key": key,
				"group_id": nil, "seq_hashes": []uint64{}, "block_hashes": []uint64{}, "base_block_idx": nil}
			if kind == "stored" {
				list[i]["parent_hash"], list[i]["token_ids"], list[i]["parent_block_hash"] = nil, nil, nil
			}
		}
		m.events.send(list)
		keys = keys[n:]
	}
}

func (p *publisher) send(list []map[string]any) {
	if p.pub == nil {
		return
	}
	now := time.Now().UnixMilli()
	for _, e := range list {
		p.events++
		for field, value := range map[string]any{"event_id": p.events, "timestamp": now, "model_name": nil,
			"block_size": nil, "additional_salt": nil,
			"lora_name": nil, "tenant_id": "default", "backend_id": "built-in", "dp_rank": 0} {
			e[field] = value
		}
	}
	payload, err := msgpack.Marshal([]any{now, list, 0})
	if err != nil {
		panic(err) // all values can be encoded
	}
	p.number++
	p.batches++
	if p.lose > 0 {
		p.lose--
		return
	}
	_ = p.pub.Send(nil, binary.BigEndian.AppendUint64(nil, p.number), payload) // a stopped publisher has no subscribers
}

func (m *Master) eventStatus(w http.ResponseWriter, _ *http.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := &m.events
	fmt.Fprintf(w,
		`{"enabled":%v,"published_batches":%d,"published_events":%d,"dropped_events":0,"skipped_unparsed_keys":0}`,
		p.pub != nil, p.batches, p.events)
}
