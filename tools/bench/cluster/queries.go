package cluster

import (
	"context"
	"encoding/binary"
	"fmt"
	"strconv"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

// question returns a prompt. For an even prompt all workers hold all blocks, for an odd prompt half of the blocks.
func (b *bed) question(i int) *api.Query {
	prompts := b.o.Blocks / prompt
	n := i % prompts &^ 1
	q := &api.Query{Model: model}
	for _, l := range b.content(0, n) {
		q.Hashes = append(q.Hashes, uint64(l))
	}
	return q
}

// whole returns an error if an answer differs from the published blocks.
func (b *bed) whole(a *api.Answer) error {
	if !a.Complete || len(a.Workers) != b.o.Workers || a.Workers[0].Device != prompt {
		return fmt.Errorf("the answer differs from the published blocks: complete %v, %d workers of %d", a.Complete,
			len(a.Workers), b.o.Workers)
	}
	return nil
}

// located waits until all nodes have the locations of the model's workers: until a run of complete answers includes
// answers of every node.
func (b *bed) located(client *client.Client) error {
	within, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	for inRow := 0; inRow < 100; inRow++ {
		a, err := client.Find(within, b.question(inRow))
		if err == nil {
			err = b.whole(a)
		}
		if err != nil {
			if within.Err() != nil {
				return err
			}
			inRow = 0
			time.Sleep(20 * time.Millisecond)
		}
	}
	return nil
}

// queries alternates between a query and bare requests of equal sizes.
func (b *bed) queries() error {
	echo, err := b.echo("echo")
	if err != nil {
		return err
	}
	defer echo.stop()
	for i := range relays {
		p, err := b.echo("relay" + strconv.Itoa(i))
		if err != nil {
			return err
		}
		defer p.stop()
	}
	var asked, answered int // bytes
	client := b.client("three")
	var query, bare, relayed []time.Duration
	body := make([]byte, 0, 4096)
	for i, lacking := 0, 0; i < b.o.Queries+200; i++ {
		q := b.question(i)
		begun := time.Now()
		a, err := client.Find(b.ctx, q)
		took := time.Since(begun)
		if err != nil {
			return err
		}
		if err := b.whole(a); err != nil {
			if lacking++; a.Complete || lacking > 10 {
				return err
			}
			i-- // retry an incomplete answer, after a pause of a node
			continue
		}
		packed, err := api.Marshal(api.MsgPack, q)
		if err != nil {
			return err
		}
		asked = len(packed)
		if packed, err = api.Marshal(api.MsgPack, a); err != nil {
			return err
		}
		answered = len(packed)
		body = append(body[:0], make([]byte, asked)...)
		binary.LittleEndian.PutUint32(body, uint32(answered))
		plain, err := b.timed(echoAt, body, answered)
		if err != nil {
			return err
		}
		twice, err := b.timed(relayAt, body, answered)
		if err != nil {
			return err
		}
		if i >= 200 { // by then connections and caches are warm
			query, bare, relayed = append(query, took), append(bare, plain), append(relayed, twice)
		}
	}
	b.report.Query, b.report.Bare, b.report.Relay = timesOf(query), timesOf(bare), timesOf(relayed)
	b.report.Asked, b.report.Answered = asked, answered
	return nil
}

// timed requests a number of bytes at a subject and returns the duration.
func (b *bed) timed(subject string, body []byte, answered int) (time.Duration, error) {
	begun := time.Now()
	reply, err := b.users.bare.conn.Request(b.ctx, subject, api.MsgPack, body)
	took := time.Since(begun)
	if err == nil && len(reply.Body) != answered {
		err = fmt.Errorf("%s sent %d bytes, not %d", subject, len(reply.Body), answered)
	}
	return took, err
}
