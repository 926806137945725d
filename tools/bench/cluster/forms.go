package cluster

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

const (
	longBlocks = 767 // of the prompt for each form; all workers hold the first [prompt] blocks
	formRounds = 5
	formWarm   = 50 // warm-up queries
)

// Form is the cost of queries for a long prompt in a single form, on a single node, beside bare requests of equal
// sizes.
type Form struct {
	Name   string    `json:"form"`
	Ratio  float64   `json:"p50_ratio"` // median of the rounds'
	Rounds []float64 `json:"p50_ratio_rounds"`

	Asked    int   `json:"request_bytes"`
	Answered int   `json:"reply_bytes"`
	Query    Times `json:"query"`
	Bare     Times `json:"bare"`

	contentType string
	body, plain []byte
	took, bare  []time.Duration // of this round
	all, allOf  []time.Duration // took and bare of all rounds
}

// longPrompt is a prompt of longBlocks blocks.
func longPrompt() (t api.Tokens) {
	for i := range uint32(longBlocks * blockSize) {
		t = append(t, i*7919%150_000)
	}
	return t
}

// forms alternates between the forms on the single node and sends a bare request with every query. Encoding of requests
// and decoding of replies are outside the measured time.
func (b *bed) forms(namespace string) error {
	echo, err := b.echo("echo")
	if err != nil {
		return err
	}
	defer echo.stop()
	tokens := &api.Query{Model: model, Tokens: longPrompt()}
	locals, err := tokens.Locals(nil, blockSize, 0)
	if err != nil {
		return err
	}
	hashes := &api.Query{Model: model}
	for _, l := range locals {
		hashes.Hashes = append(hashes.Hashes, uint64(l))
	}
	for _, f := range []struct {
		name, contentType string
		q                 *api.Query
	}{
		{"JSON, hashes", api.JSON, hashes}, {"JSON, tokens", api.JSON, tokens},
		{"MessagePack, hashes", api.MsgPack, hashes},
	} {
		body, err := api.Marshal(f.contentType, f.q)
		if err != nil {
			return err
		}
		b.report.Forms = append(b.report.Forms, Form{Name: f.name, contentType: f.contentType, body: body,
			plain: make([]byte, len(body))})
	}
	subject, asking := jetstream.Names(namespace).Query(ops.Find), b.users.as(namespace, natsauth.RoleRouter).conn
	for round := range formRounds {
		for i := range formWarm + max(b.o.Queries/formRounds, 20) {
			for k := range b.report.Forms {
				if err := b.ask(asking, subject, &b.report.Forms[k], i >= formWarm); err != nil {
					return fmt.Errorf("%s, round %d: %w", b.report.Forms[k].Name, round+1, err)
				}
			}
		}
		for k := range b.report.Forms {
			b.report.Forms[k].endRound()
		}
	}
	return nil
}

// ask sends a query and a bare request.
func (b *bed) ask(asking *jetstream.Conn, subject string, f *Form, counts bool) error {
	begun := time.Now()
	reply, err := asking.Request(b.ctx, subject, f.contentType, f.body)
	took := time.Since(begun)
	if err != nil {
		return err
	}
	binary.LittleEndian.PutUint32(f.plain, uint32(len(reply.Body)))
	bare, err := b.timed(echoAt, f.plain, len(reply.Body))
	if err != nil {
		return err
	}
	if len(reply.Body) != f.Answered { // a reply of equal length has equal content
		var a api.Answer
		if err := api.DecodeReply(f.contentType, reply.Body, &a); err != nil {
			return err
		}
		if err := b.whole(&a); err != nil {
			return err
		}
		f.Asked, f.Answered = len(f.body), len(reply.Body)
	}
	if counts {
		f.took, f.bare = append(f.took, took), append(f.bare, bare)
	}
	return nil
}

func (f *Form) endRound() {
	f.Rounds = append(f.Rounds, timesOf(f.took).P50/timesOf(f.bare).P50)
	f.all, f.allOf = append(f.all, f.took...), append(f.allOf, f.bare...)
	f.took, f.bare = nil, nil
	f.Query, f.Bare = timesOf(f.all), timesOf(f.allOf)
	sorted := slices.Sorted(slices.Values(f.Rounds))
	f.Ratio = sorted[len(sorted)/2]
}
