package source

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"reflect"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/ingest/dynamo"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestEndOfPublishersShim: if the shim of a rank ends, since another shim has the rank, the subscription to the silent
// publisher ends with the reason.
func TestEndOfPublishersShim(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	server := natskit.Start(t, natsserver.Options{})
	conn := natskit.Connect(t, server)
	ns, err := jetstream.JoinNamespace(ctx, conn, jetstream.NamespaceConfig{Name: "test", Partitions: 1})
	if err != nil {
		t.Fatal(err)
	}
	key := events.RankKey{Instance: "w"}
	other, err := shim.Claim(ctx, ns, key, false)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	f := &Source{Shim: &host.Shim{Shared: &host.Shared{}}, ns: ns, log: slog.New(slog.DiscardHandler), ctx: ctx}
	err = f.servePublisher(ctx, dynamo.Publisher{Key: key, Known: true, Endpoint: "tcp://" + silent.Addr().String()})
	if !errors.Is(err, shim.ErrFenced) || ctx.Err() != nil {
		t.Errorf("%v, %v", err, ctx.Err())
	}
}

// TestSetDecoder: two stores of a block become one, and the new blocks of an event keep their places.
func TestSetDecoder(t *testing.T) {
	d := &setDecoder{}
	key := events.RankKey{Instance: "1"}
	line := func(e events.Event) []byte { return events.AppendRouterEvent(nil, key, 1, &e) }
	store := func(blocks ...events.BlockHash) []byte {
		e := events.Event{Kind: events.Stored, Tier: events.Device, Blocks: blocks}
		for _, b := range blocks {
			e.Locals = append(e.Locals, events.LocalHash(b*10))
		}
		return line(e)
	}
	for i, c := range []struct {
		line []byte
		want string
	}{
		{store(1, 2, 3), "[1 2 3] after 0"},
		{store(1, 2, 3), ""},
		{line(events.Event{Kind: events.Removed, Tier: events.Device, Blocks: []events.BlockHash{2}}), "-[2]"},
		{store(0, 1, 2, 3, 4), "[0] after 0, [2] after 1, [4] after 3"},
		{nil, ""},
		{line(events.Event{Kind: events.Cleared, Tier: events.AllTiers}), "-[]"},
		{store(3), "[3] after 0"},
	} {
		m, err := d.decode(c.line)
		got := ""
		for _, e := range m.Events {
			if got != "" {
				got += ", "
			}
			if e.Kind == events.Stored {
				got += fmt.Sprintf("%v after %d", e.Blocks, e.Parent)
				if len(e.Locals) != len(e.Blocks) || e.Locals[0] != events.LocalHash(e.Blocks[0]*10) {
					t.Errorf("event %d: %+v", i, e)
				}
			} else {
				got += fmt.Sprintf("-%v", e.Blocks)
			}
		}
		if err != nil || got != c.want {
			t.Errorf("event %d: %q, want %q, %v", i, got, c.want, err)
		}
	}
	if _, err := d.decode([]byte("{")); err == nil {
		t.Error("an invalid line is decoded")
	}
}

// TestSetDecoderGroups: the decoder emits the facts of KV-cache groups and their blocks, each block once.
func TestSetDecoderGroups(t *testing.T) {
	d := &setDecoder{}
	group := func(g events.GroupIndex, blocks ...events.BlockHash) events.Event {
		return events.Event{Kind: events.Stored, Tier: events.Device, Group: g, Window: 16,
			Attention: events.AttentionSlidingWindow, Blocks: blocks}
	}
	want := []events.Event{{Kind: events.Cleared, Tier: events.AllTiers, Reason: events.ReasonEngine}, group(1),
		group(2, 5), group(2, 6), group(3, 5)}
	m, err := d.decode(events.AppendRouterEvent(nil, events.RankKey{Instance: "1"}, 1, &want[0], group(1),
		group(2, 5, 5, 6), group(3, 5)))
	if err != nil || !reflect.DeepEqual(m.Events, want) {
		t.Errorf("%+v, want %+v, %v", m.Events, want, err)
	}
}

// TestSetDecoderAfterAGap: a lost message may have removed a block. A later store of the block is emitted, and the
// blocks after it have their parent.
func TestSetDecoderAfterAGap(t *testing.T) {
	line := func(parent, b events.BlockHash) []byte {
		e := events.Event{Kind: events.Stored, Tier: events.Device, HasParent: parent != 0, Parent: parent,
			Blocks: []events.BlockHash{b}, Locals: []events.LocalHash{events.LocalHash(b)}}
		return events.AppendRouterEvent(nil, events.RankKey{Instance: "1"}, 1, &e)
	}
	m := shim.NewMachine(shim.Identity{Model: "m", BlockSize: 16}, shim.Limits{}, false, newSetDecoder())
	m.Recovered(shim.Published{}, 1)
	for _, f := range []shim.Frame{{Seq: 1, Payload: line(0, 1)}, {Seq: 3, Payload: line(0, 1)},
		{Seq: 4, Payload: line(1, 2)}} {
		m.Live(f, 1)
	}
	ready, err := m.Advance(true)
	if err != nil {
		t.Fatal(err)
	}
	var held []events.BlockHash
	for _, data := range ready.Flight {
		var b events.Batch
		if err := events.DecodeBatch(data, &b); err != nil {
			t.Fatal(err)
		}
		for _, e := range b.Events {
			if e.Kind == events.Cleared {
				held = nil
			}
			held = append(held, e.Blocks...)
		}
	}
	if !slices.Equal(held, []events.BlockHash{1, 2}) {
		t.Errorf("after the gap the log has %v", held)
	}
}

// TestLooks: a worker writes the record of a publisher's rank a moment after the record of the publisher. The
// subscription waits for the rank, for at most ten looks in a row.
func TestLooks(t *testing.T) {
	l, bare := looks{}, dynamo.Publisher{ID: 1}
	whole := bare
	whole.Known = true
	look := func(p ...dynamo.Publisher) { l.count(p) }
	if look(bare); l.ripe(bare) || !l.ripe(whole) {
		t.Error("a publisher without a rank is ripe at once, or a publisher with a rank is not")
	}
	if look(whole); len(l) != 0 {
		t.Errorf("a publisher with a rank is counted: %v", l)
	}
	for range unknownLooks - 1 {
		look(bare)
	}
	if look(); l.ripe(bare) || len(l) != 0 {
		t.Errorf("a missing publisher is counted: %v", l)
	}
	for range unknownLooks {
		look(bare)
	}
	if !l.ripe(bare) {
		t.Error("a publisher without a rank is never ripe")
	}
}
