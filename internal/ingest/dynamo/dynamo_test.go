package dynamo

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Output of processes of ai-dynamo-runtime 1.6.1: the last frame of an event plane message, the body of a local
// indexer's answers, and records of discovery.
const (
	frame = "010000014985ac7075626c69736865725f6964cf0012453e41de4336a873657175656e636500ac7075626c69736865645f6174cf00" +
		"0001a2057fd398a5746f706963a96b762d6576656e7473a77061796c6f6164c4f89184a9776f726b65725f6964cfc89292c10385ef5a" +
		"ac73746f726167655f74696572a6646576696365b07265736964656e63795f646f6d61696ea6776f726b6572a56576656e7483a86576" +
		"656e745f696401a46461746181a673746f72656483ab706172656e745f68617368c0ae73746172745f706f736974696f6ec0a6626c6f" +
		"636b739283aa626c6f636b5f6861736865ab746f6b656e735f68617368cf4e02a55322ef989ead6d6d5f65787472615f696e666fc083" +
		"aa626c6f636b5f68617368cfffffffffffffff9aab746f6b656e735f68617368cf4c583009d85469a8ad6d6d5f65787472615f696e66" +
		"6fc0a764705f72616e6b01"
	treeDump = "82a46461746181a85472656544756d7083a66576656e74739184a9776f726b65725f6964cf57a1c7d28fe70466ac73746f72616765" +
		"5f74696572a6646576696365b07265736964656e63795f646f6d61696ea6776f726b6572a56576656e7483a86576656e745f696400a4" +
		"6461746181a673746f72656483ab706172656e745f68617368c0ae73746172745f706f736974696f6ec0a6626c6f636b739283aa626c" +
		"6f636b5f6861736865ab746f6b656e735f68617368cfcb38e4d7fb2dca5cad6d6d5f65787472615f696e666fc083aa626c6f636b5f68" +
		"61736866ab746f6b656e735f68617368cfe8d3ec39b907b74cad6d6d5f65787472615f696e666fc0a764705f72616e6b00ad6c617374" +
		"5f6576656e745f696401ab72657365745f73636f7065a3616c6cae636f6d706c6574655f66696e616cc2"
	tooNew = "82a46461746181a6546f6f4e657783af7265717565737465645f737461727409ad7265717565737465645f656e6401b06e657765737" +
		"45f617661696c61626c6501ae636f6d706c6574655f66696e616cc2"
	sourceRecord = `{"type":"EventSource","scope":{"kind":"endpoint","endpoint":{"namespace":"ns","component":"backend",` +
		`"name":"generate"}},"topic":"kv-events","publisher_id":2219950695499162,"metadata":{"kv_state_endpoint":` +
		`{"namespace":"ns","component":"backend","name":"generate"},"worker":{"worker_id":16906666470417415194,` +
		`"dp_rank":1},"publisher_id":2219950695499162,"recovery_target":{"component":"backend","endpoint":` +
		`"worker_kv_query_source_7e3088c9fc59a","namespace":"ns","instance_id":16906666470417415194,"transport":{"tcp":` +
		`"192.0.2.2:43771/eaa08b94593cbc1a/ns/backend/worker_kv_query_source_7e3088c9fc59a"},"device_type":"cuda",` +
		`"request_plane_codec":"msgpack"}}}`
	channelRecord = `{"type":"EventChannel","scope":{"kind":"endpoint","endpoint":{"namespace":"ns","component":"backend",` +
		`"name":"generate"}},"topic":"kv-events","instance_id":2219950695499162,"transport":{"kind":"Zmq","config":` +
		`{"endpoint":"tcp://192.0.2.2:39773"}}}`
)

func unhex(t testing.TB, text string) []byte {
	b, err := hex.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestEnvelope(t *testing.T) {
	good := unhex(t, frame)
	var got []events.RouterEvent
	data, err := Envelope([][]byte{[]byte(Topic), make([]byte, 8), make([]byte, 8), good})
	if err == nil {
		err = events.ReadRouterEnvelope(data, func(e events.RouterEvent) { got = append(got, e) })
	}
	if err != nil || len(got) != 1 || got[0].ID != 1 || got[0].Key.String() != "14452775511870795610/1" ||
		len(got[0].Event.Blocks) != 2 || got[0].Event.Locals[0] != 0x4e02a55322ef989e {
		t.Fatalf("%+v, %v", got, err)
	}
	for _, bad := range [][][]byte{nil, {good}, {nil, nil, nil, good[:4]}, {nil, nil, nil, good[:9]},
		{nil, nil, nil, append([]byte{2}, good[1:]...)}} {
		if _, err := Envelope(bad); err == nil {
			t.Errorf("%x is a message", bad)
		}
	}
}

func TestPublishers(t *testing.T) {
	folder, now := t.TempDir(), time.Now()
	if list, wrong, err := Publishers(folder, now); len(list)+len(wrong) > 0 || err != nil {
		t.Fatal(list, wrong, err)
	}
	write := func(name, text string) {
		path := filepath.Join(folder, "v1", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("event_channels/a", channelRecord)
	want := Publisher{ID: 2219950695499162, Scope: "ns.backend.generate", Topic: Topic, Endpoint: "tcp://192.0.2.2:39773"}
	if list, wrong, err := Publishers(folder, now); len(list) != 1 || list[0] != want || wrong != nil || err != nil {
		t.Errorf("for a channel without a source: %+v, %v, %v", list, wrong, err)
	}
	write("event_sources/a", sourceRecord)
	write("event_channels/b", strings.Replace(channelRecord, "kv-events", "kv_metrics", 1))
	write("event_channels/c", strings.Replace(channelRecord, "Zmq", "Nats", 1))
	write("event_channels/d", "{")
	want.Known, want.Key = true, events.RankKey{Instance: "16906666470417415194", Rank: 1}
	write("mdc/a", modelText)
	want.Card = Card{Role: "prefill", BootstrapPort: 5678, TotalKVBlocks: 123, MaxBatchedTokens: 456}
	want.Indexer = "192.0.2.2:43771/eaa08b94593cbc1a/ns/backend/worker_kv_query_source_7e3088c9fc59a"
	list, wrong, err := Publishers(folder, now)
	if len(list) != 1 || list[0] != want || len(wrong) != 2 || err != nil {
		t.Errorf("%+v, %v, %v", list, wrong, err)
	}
	if list, _, err := Publishers(folder, now.Add(time.Minute)); len(list) > 0 || err != nil {
		t.Errorf("publishers of untouched records: %+v, %v", list, err)
	}
}

// worker answers one request with a body, as a worker does. A stranger connects before the worker.
func worker(t *testing.T, refuse string, body []byte) (indexer string, request <-chan []byte) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	said := make(chan []byte, 1)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		part := func(width int) []byte {
			length := make([]byte, 4)
			_, _ = io.ReadFull(conn, length[4-width:]) // a failing test reports enough
			b, _ := readN(conn, int(binary.BigEndian.Uint32(length)))
			return b
		}
		path, _, message := part(2), part(2), part(4)
		head, query, err := readMessage(bytes.NewReader(message), maxHead)
		if err != nil || string(path) != "a/path" {
			t.Errorf("%s: %x, %v", path, message, err)
		}
		said <- query
		_, _ = conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(refuse))), refuse...))
		var control struct {
			Connection struct{ Info string } `json:"connection_info"`
		}
		var info struct{ Address, Subject string }
		if json.Unmarshal(head, &control) != nil || json.Unmarshal([]byte(control.Connection.Info), &info) != nil {
			t.Errorf("%s", head)
		}
		for _, subject := range []string{"another", info.Subject} {
			back, err := net.Dial("tcp", info.Address)
			if err != nil {
				return // refused
			}
			b := appendMessage(nil, []byte(`{"subject":"`+subject+`","stream_type":"response"}`), nil)
			b = appendMessage(b, []byte(`{"error":null}`), nil)
			_, _ = back.Write(appendMessage(b, nil, body))
			back.Close()
		}
	}()
	return l.Addr().String() + "/a/path", said
}

func TestAsk(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	key := events.RankKey{Instance: "16906666470417415194", Rank: 1}
	at, said := worker(t, "", unhex(t, treeDump))
	a, err := Ask(ctx, nil, at, key, 0)
	if err != nil || !a.Whole || a.Last != 1 || len(a.Events) != 1 || len(a.Events[0].Event.Blocks) != 2 {
		t.Errorf("%+v, %v", a, err)
	}
	// The query of Dynamo's own client.
	const query = "85a9776f726b65725f6964cfeaa08b94593cbc1aa764705f72616e6b01ae73746172745f6576656e745f6964c0" +
		"ac656e645f6576656e745f6964c0b9737570706f7274735f747265655f64756d705f6661696c6564c3"
	if got := hex.EncodeToString(<-said); got != query {
		t.Errorf("the query is %s", got)
	}
	at, _ = worker(t, "", unhex(t, tooNew))
	if a, err := Ask(ctx, nil, at, key, 9); err != nil || a.Whole || a.Last != 1 || len(a.Events) != 0 {
		t.Errorf("%+v, %v", a, err)
	}
	at, _ = worker(t, "Server overloaded: a", nil)
	if _, err := Ask(ctx, nil, at, key, 9); err == nil || !strings.Contains(err.Error(), "Server overloaded: a") {
		t.Error(err)
	}
	for _, bad := range []string{"127.0.0.1:1", "127.0.0.1:1/x"} {
		if _, err := Ask(ctx, nil, bad, key, 9); err == nil {
			t.Errorf("%s answers", bad)
		}
	}
}

// FuzzAnswer decodes random bytes as a worker's answer and as a message of the event plane.
func FuzzAnswer(f *testing.F) {
	for _, body := range []string{treeDump, tooNew} {
		b := appendMessage(nil, []byte(`{"subject":"s","stream_type":"response"}`), nil)
		b = appendMessage(b, []byte(`{"error":null}`), nil)
		f.Add(appendMessage(b, nil, unhex(f, body)))
	}
	f.Add(unhex(f, frame))
	f.Fuzz(func(t *testing.T, data []byte) {
		if data, err := Envelope([][]byte{nil, nil, nil, data}); err == nil {
			_ = events.ReadRouterEnvelope(data, func(events.RouterEvent) {}) // any error is acceptable
		}
		_, _ = events.ReadRouterAnswer(data)
		near, far := net.Pipe()
		go func() {
			_, _ = far.Write(data)
			far.Close()
		}()
		_, _, _ = readCall(near, "s")
		near.Close()
	})
}
