package cluster

import (
	"context"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/corpus"
)

// content returns the blocks of a prompt. All workers hold every second prompt. The first prompt is the beginning of
// the long prompt.
func (b *bed) content(worker, n int) (locals []events.LocalHash) {
	if n == 0 {
		q := api.Query{Tokens: longPrompt()[:prompt*blockSize]}
		locals, _ = q.Locals(nil, blockSize, 0) // a good size of blocks
		return locals
	}
	id := uint64(n)
	if n%2 == 1 {
		id |= uint64(worker+1) << 32
	}
	for i := range uint64(prompt) {
		locals = append(locals, events.LocalHash(corpus.Mix(corpus.Mix(id+1)+i)))
	}
	return locals
}

// messages returns the messages of a worker's shim.
func (b *bed) messages(worker int) (list [][]byte, err error) {
	batch := events.Batch{Incarnation: 1, FirstID: 1, Model: model, BlockSize: blockSize}
	seal := func() {
		if len(batch.Events) > 0 && err == nil {
			var data []byte
			data, err = events.AppendBatch(nil, &batch)
			list = append(list, data)
			batch.FirstID += events.EventID(len(batch.Events))
			batch.Events = batch.Events[:0]
		}
	}
	for round := range Rounds {
		if round > 0 {
			batch.Events = append(batch.Events, events.Event{Kind: events.Cleared, Reason: events.ReasonOperator})
		}
		for n := range b.o.Blocks / prompt {
			locals := b.content(worker, n)
			for at := 0; at < prompt; at += perEvent {
				e := events.Event{Kind: events.Stored, Tier: events.Device, Attention: events.AttentionFull,
					Locals: locals[at : at+perEvent]}
				for _, l := range e.Locals {
					e.Blocks = append(e.Blocks, events.BlockHash(corpus.Mix(uint64(l))))
				}
				if at > 0 {
					e.HasParent, e.Parent = true, events.BlockHash(corpus.Mix(uint64(locals[at-1])))
				}
				if batch.Events = append(batch.Events, e); len(batch.Events) == perBatch {
					seal()
				}
			}
		}
		seal()
	}
	return list, err
}

// ingest publishes all events and waits until the nodes have applied the blocks on the given number of copies.
func (b *bed) ingest(namespace string, client *client.Client, copies int, nodes ...*process) (t Taken, err error) {
	ns, err := jetstream.OpenNamespace(b.ctx, b.users.as(namespace, natsauth.RolePool).conn, namespace)
	if err != nil {
		return t, err
	}
	pubs, left := make([]*jetstream.Publisher, b.o.Workers), make([][][]byte, b.o.Workers)
	for w := range pubs {
		if err := registry.Claim(b.ctx, ns, events.WorkerID(fmt.Sprint("w", w)), model); err != nil {
			return t, err
		}
		if pubs[w], err = ns.OpenPublisher(b.ctx, events.RankKey{Instance: events.WorkerID(fmt.Sprint("w", w))},
			jetstream.PublisherOptions{}); err != nil {
			return t, err
		}
		if left[w], err = b.messages(w); err != nil {
			return t, err
		}
	}
	before, err := spent(nodes)
	if err != nil {
		return t, err
	}
	begun := time.Now()
	last := map[events.Partition]events.StreamSeq{}
	for more := true; more; {
		more = false
		for w, pub := range pubs {
			k := min(flight, len(left[w]))
			if k == 0 {
				continue
			}
			seq, err := pub.Publish(b.ctx, left[w][:k])
			if err != nil {
				return t, err
			}
			left[w], more = left[w][k:], true
			last[pub.Partition()] = max(last[pub.Partition()], seq)
		}
	}
	b.filled = last
	if err := b.reflected(namespace, last, len(nodes)); err != nil {
		return t, err
	}
	t.Seconds = time.Since(begun).Seconds()
	after, err := spent(nodes)
	if err != nil {
		return t, err
	}
	t.CPU = max(after-before, time.Millisecond).Seconds()
	t.Blocks = uint64(Rounds * copies * b.o.Workers * (b.o.Blocks / prompt) * prompt)
	t.PerCPU, t.PerSeconds = float64(t.Blocks)/t.CPU, float64(t.Blocks)/t.Seconds
	return t, nil
}

// reflected waits until every replica has applied the log. It polls the status of every node.
func (b *bed) reflected(namespace string, last map[events.Partition]events.StreamSeq, nodes int) error {
	names := b.names
	if nodes == 1 {
		names = []string{"one"}
	}
	for _, name := range names {
		own := b.nodeClient(namespace, name)
		for begun := time.Now(); ; time.Sleep(20 * time.Millisecond) {
			within, cancel := context.WithTimeout(b.ctx, 5*time.Second)
			s, err := own.Status(within)
			cancel()
			behind := err != nil
			for i := 0; err == nil && i < len(s.Partitions); i++ {
				behind = behind || s.Partitions[i].Seq < last[s.Partitions[i].Partition]
			}
			if !behind {
				break
			}
			if b.ctx.Err() != nil {
				return b.ctx.Err()
			}
			if time.Since(begun) > patience {
				return fmt.Errorf("node %s has not applied the log within %v: %w", name, patience, err)
			}
		}
	}
	return nil
}
