// Package control sends requests to running shims over NATS. A request identifies the shim of a rank, or makes a shim
// publish the engine's holdings again.
//
// A shim answers on the control subjects of its rank and of its partition ([Serve]). [Resync] requests a new
// incarnation from a shim, or from all shims of a partition. The new incarnation starts with the events that the engine
// can still repeat. A shim performs a resync once per id, so the caller may repeat a request after a lost answer.
//
// internal/ingest/shim carries out a resync, and internal/index/node decides when to request a resync.
package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// patience bounds the wait for a shim's answer. A request to a single shim is sent twice.
const patience = 2 * time.Second

// request is the JSON body of a request to shims.
type request struct {
	Op       string             `json:"op"`                 // opWho, opResync, opPresent, opLoads
	ID       string             `json:"id,omitempty"`       // of a resync
	Instance events.WorkerID    `json:"instance,omitempty"` // if not empty, only this worker answers
	Lost     bool               `json:"lost,omitempty"`     // of a resync, see ResyncRequest
	Of       events.Incarnation `json:"of,omitempty"`
}

const (
	opWho     = "who"
	opResync  = "resync"
	opPresent = "present" // no answer: the NATS server reports a subject without subscribers
	opLoads   = "loads"   // no answer: the shim reports its engine's load for a while
)

// Shim describes a running shim, in its answer to a request.
type Shim struct {
	Instance    events.WorkerID    `json:"instance"`
	Rank        events.Rank        `json:"rank"`
	Incarnation events.Incarnation `json:"incarnation"` // 0 before the first incarnation
	Host        string             `json:"host"`
	PID         int                `json:"pid"`
	Since       time.Time          `json:"since"`

	// Replay reports whether the engine can repeat earlier events or list its blocks. Otherwise a new incarnation starts
	// with later events only.
	Replay bool `json:"replay"`

	// Waiting describes a log that does not accept the shim's events; nil if the log accepts them.
	Waiting *Waiting `json:"waiting,omitempty"`

	// Endpoint and ReplayEndpoint are the engine's endpoints, as the shim dials them. Both are empty for a shim with
	// another source of events.
	Endpoint       string `json:"endpoint,omitempty"`
	ReplayEndpoint string `json:"replay_endpoint,omitempty"`

	// Heard counts the engine's messages by outcome. nil: the shim has not started to read, or the release does not report
	// counts.
	Heard *Heard `json:"heard,omitempty"`
}

// Heard counts an engine's messages by outcome, since the start of its shim.
type Heard struct {
	Messages   uint64 `json:"messages"`
	Unreadable uint64 `json:"unreadable"` // of the messages

	Gaps       uint64 `json:"gaps"`        // messages were missing for good, and the rank's holdings were cleared
	JoinedLate uint64 `json:"joined_late"` // the engine had published before, and could not repeat the events

	// Skipped counts skipped events that lost information, by reason.
	Skipped map[string]uint64 `json:"skipped,omitempty"`

	// ReplayFailed is the error of the last request to the replay endpoint. Empty after a success and before the first
	// request.
	ReplayFailed string `json:"replay_failed,omitempty"`
}

// Waiting describes a shim that waits for the log.
type Waiting struct {
	Since time.Time `json:"since"` // on the shim's clock
	Why   string    `json:"why"`
	Do    string    `json:"what_to_do"`
}

// Key returns the rank that the shim serves.
func (s *Shim) Key() events.RankKey { return events.RankKey{Instance: s.Instance, Rank: s.Rank} }

func (s *Shim) String() string {
	return fmt.Sprintf("process %d on %s, since %s", s.PID, s.Host, s.Since.UTC().Format(time.RFC3339))
}

// ResyncRequest describes a resync. The zero value of Lost and Of requests a new incarnation unconditionally, as an
// operator does.
type ResyncRequest struct {
	ID string // a shim performs a resync once per id

	// Lost means that the partition's log has lost messages. A shim does not begin a new incarnation if the log still
	// has all events of the present incarnation: the shim may have noticed the loss itself, or another node may have
	// sent a request.
	Lost bool

	Of events.Incarnation // if not 0, events of this incarnation are missing; a later incarnation fulfils the request
}

// Handler answers requests for a shim. All methods must be safe for concurrent use.
type Handler interface {
	Self() Shim

	// WantLoads records that a node needs the load of the engine.
	WantLoads()

	// Resync begins a new incarnation and returns its number. No new incarnation begins for a repeated id, or
	// if the conditions of the request do not hold.
	Resync(ctx context.Context, a ResyncRequest) (Shim, error)
}

// Serve answers requests for a rank until the returned function is called.
func Serve(ns *jetstream.Namespace, key events.RankKey, h Handler) (stop func(), err error) {
	p, err := ns.PartitionOf(key.Instance)
	if err != nil {
		return nil, err
	}
	subject, err := jetstream.Names(ns.Name()).ControlRank(p, key)
	if err != nil {
		return nil, err
	}
	answers, err := jetstream.Names(ns.Name()).Answer(p, key, "")
	if err != nil {
		return nil, err
	}
	answer := func(ctx context.Context, r jetstream.Request) jetstream.Response {
		var req request
		if err := strictjson.Unmarshal(r.Body, &req); err != nil {
			return jetstream.Response{Code: 400, Description: "the request is not JSON: " + err.Error()}
		}
		var s Shim
		switch {
		case req.Instance != "" && req.Instance != key.Instance:
			return jetstream.Response{Code: 404, Description: "the request is for another instance"}
		case req.Op == opLoads:
			h.WantLoads()
			return jetstream.Response{Elsewhere: true}
		case req.Op == opPresent:
			return jetstream.Response{Elsewhere: true}
		case req.Op == opWho:
			s = h.Self()
		case req.Op == opResync && req.ID != "":
			var err error // a local error: several goroutines answer
			if s, err = h.Resync(ctx, ResyncRequest{ID: req.ID, Lost: req.Lost, Of: req.Of}); err != nil {
				return jetstream.Response{Code: 503, Description: err.Error()}
			}
		default:
			return jetstream.Response{Code: 400, Description: fmt.Sprintf("cannot do %.40q", req.Op)}
		}
		body, err := json.Marshal(s)
		if err != nil {
			return jetstream.Response{Code: 500, Description: err.Error()}
		}
		return jetstream.Response{ContentType: jetstream.ContentJSON, Body: body}
	}
	service, err := jetstream.Serve(ns.Conn(), jetstream.ServiceConfig{
		Name: "kvatlas-shim", Version: "0.0.0", Description: "shim of " + key.String() + ", namespace " +
			ns.Name(), Workers: 2,
		AnswerOn: func(id string) string { return answers + id },
		Endpoints: []jetstream.Endpoint{
			{Name: "partition", Subject: jetstream.Names(ns.Name()).Control(p), Handler: answer},
			{Name: "rank", Subject: subject, Handler: answer},
		},
	})
	if err != nil {
		return nil, err
	}
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		service.Stop(ctx)
	}, nil
}

// ShimOf returns the shim that serves a rank now. The result is nil without an answer.
func ShimOf(ctx context.Context, ns *jetstream.Namespace, key events.RankKey) (*Shim, error) {
	return askRank(ctx, ns, key, request{Op: opWho})
}

// Absent returns the ranks without a connected shim: their control subjects have no subscriber. Shims do not answer
// such requests, so the cost is one message per rank.
func Absent(ctx context.Context, ns *jetstream.Namespace, ranks []events.RankKey) ([]events.RankKey, error) {
	body, err := json.Marshal(request{Op: opPresent})
	if err != nil {
		return nil, err
	}
	return ns.Absent(ctx, ranks, body)
}

// WantLoads asks the shims of a partition for the loads of their engines. A shim reports for [LoadsWanted], as an
// [api.EngineLoads], if it reads the engine's API.
func WantLoads(ns *jetstream.Namespace, p events.Partition) error {
	body, err := json.Marshal(request{Op: opLoads})
	if err != nil {
		return err
	}
	return ns.Conn().Send(jetstream.Names(ns.Name()).Control(p), jetstream.ContentJSON, body)
}

// LoadsWanted is the time for which a shim reports loads after a request.
const LoadsWanted = 15 * time.Second

// ShimsOf returns the answers of all shims of a partition. The wait lasts two seconds, because the number of shims is
// unknown.
func ShimsOf(ctx context.Context, ns *jetstream.Namespace, p events.Partition) ([]Shim, error) {
	return gather(ctx, ns, p, request{Op: opWho})
}

// Resync sends a resync request to the shim of one rank. The result is nil without an answer.
func Resync(ctx context.Context, ns *jetstream.Namespace, key events.RankKey, a ResyncRequest) (*Shim, error) {
	return askRank(ctx, ns, key, request{Op: opResync, ID: a.ID, Lost: a.Lost, Of: a.Of})
}

// askRank sends a request to one rank and returns the first answer. Without an answer from an existing subscriber, it
// repeats the request once: the shim, or the whole machine, may have stalled for a moment.
func askRank(ctx context.Context, ns *jetstream.Namespace, key events.RankKey, req request) (*Shim, error) {
	body, err := json.Marshal(req)
	if err != nil {
		return nil, err
	}
	var reply jetstream.Reply
	for range 2 {
		reply, err = ns.AskShim(ctx, patience, key, body)
		if !errors.Is(err, jetstream.ErrTimeout) {
			break
		}
	}
	switch _, refused := errors.AsType[*jetstream.ServiceError](err); {
	case errors.Is(err, jetstream.ErrNoResponder), errors.Is(err, jetstream.ErrTimeout), refused:
		return nil, nil
	case err != nil:
		return nil, err
	}
	shims := read([]jetstream.Reply{reply}, func(s Shim) bool { return s.Key() == key })
	if len(shims) == 0 {
		return nil, nil
	}
	return &shims[0], nil
}

// ResyncAll sends a resync request to the shims of a partition: all of them, or those of one instance. It waits for two
// seconds, because the number of shims is unknown.
func ResyncAll(ctx context.Context, ns *jetstream.Namespace, p events.Partition, instance events.WorkerID,
	a ResyncRequest) ([]Shim, error) {
	return gather(ctx, ns, p, request{Op: opResync, ID: a.ID, Lost: a.Lost, Of: a.Of, Instance: instance})
}

func gather(ctx context.Context, ns *jetstream.Namespace, p events.Partition, req request) ([]Shim, error) {
	body, err := json.Marshal(req)
	if err != nil {
		return nil, err
	}
	replies, err := ns.AskShims(ctx, patience, p, body)
	if err != nil {
		return nil, err
	}
	return read(replies, func(s Shim) bool {
		of, err := ns.PartitionOf(s.Instance)
		return err == nil && of == p && (req.Instance == "" || s.Instance == req.Instance)
	}), nil
}

// read decodes answers. Unreadable answers and answers of other ranks are skipped: a rank outside of the request, or a
// rank different from the subject of the answer. A faulty answer does not affect the others.
func read(replies []jetstream.Reply, asked func(Shim) bool) (shims []Shim) {
	for _, r := range replies {
		var s Shim
		if strictjson.Unmarshal(r.Body, &s) == nil && asked(s) && (r.From == nil || *r.From == s.Key()) {
			shims = append(shims, s)
		}
	}
	return shims
}
