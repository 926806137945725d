// Package control is what one may ask a running shim over NATS: who it is, and to say again what its engine holds.
//
// A shim answers on the control subjects of its rank and of its partition ([Serve]). [Who] finds out whether a rank has
// a shim that lives. [Resync] asks one shim, or all of a partition, to begin a new incarnation with what their engines
// can still say; asked twice with the same id a shim does it once. Who asks may ask again for as long as it likes,
// since answers can be lost.
//
// What a shim does then is internal/ingest/shim's; when an indexer asks is internal/index/node's.
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

// patience is how long a shim's answer is waited for; a single shim is asked twice.
const patience = 2 * time.Second

// request is what a shim is asked, in JSON.
type request struct {
	Op       string             `json:"op"`                 // opWho, opResync, opPresent
	ID       string             `json:"id,omitempty"`       // of a resync
	Instance events.WorkerID    `json:"instance,omitempty"` // if not empty, only this one is asked
	Lost     bool               `json:"lost,omitempty"`     // of a resync, as in ResyncRequest
	Of       events.Incarnation `json:"of,omitempty"`
}

const (
	opWho     = "who"
	opResync  = "resync"
	opPresent = "present" // no answer: the NATS server reports if nobody listens
)

// Shim is how a shim answers.
type Shim struct {
	Instance    events.WorkerID    `json:"instance"`
	Rank        events.Rank        `json:"rank"`
	Incarnation events.Incarnation `json:"incarnation"` // 0 while it does not know yet
	Host        string             `json:"host"`
	PID         int                `json:"pid"`
	Since       time.Time          `json:"since"`

	// Replay reports whether the engine can repeat earlier events or list its blocks. Without it, a new incarnation starts
	// with the events after its begin.
	Replay bool `json:"replay"`

	// Waiting is since when and why the log takes nothing from the shim; nil: it takes what there is.
	Waiting *Waiting `json:"waiting,omitempty"`

	// Endpoint and ReplayEndpoint are where it hears its engine, as it dials them; empty: it is fed otherwise.
	Endpoint       string `json:"endpoint,omitempty"`
	ReplayEndpoint string `json:"replay_endpoint,omitempty"`

	// Heard is what became of what its engine said; nil: the shim is of a release that does not say, or has not begun.
	Heard *Heard `json:"heard,omitempty"`
}

// Heard is what became of what an engine said, since its shim began.
type Heard struct {
	Messages   uint64 `json:"messages"`
	Unreadable uint64 `json:"unreadable"` // of the messages

	Gaps       uint64 `json:"gaps"`        // messages were missing for good: what the rank held was cleared
	JoinedLate uint64 `json:"joined_late"` // the engine had spoken before, and could not say it again

	// Skipped counts events that were passed over, by reason, where that lost something.
	Skipped map[string]uint64 `json:"skipped,omitempty"`

	// ReplayFailed is why the last question to the replay endpoint was not answered; empty: it was, or none was put.
	ReplayFailed string `json:"replay_failed,omitempty"`
}

// Waiting is how a shim waits for the log.
type Waiting struct {
	Since time.Time `json:"since"` // by the shim's clock
	Why   string    `json:"why"`
	Do    string    `json:"what_to_do"`
}

// Key is the rank that the shim serves.
func (s *Shim) Key() events.RankKey { return events.RankKey{Instance: s.Instance, Rank: s.Rank} }

func (s *Shim) String() string {
	return fmt.Sprintf("process %d on %s, since %s", s.PID, s.Host, s.Since.UTC().Format(time.RFC3339))
}

// ResyncRequest is what a resync is asked for. The zero value of Lost and Of asks for a new incarnation in any case, as
// people do.
type ResyncRequest struct {
	ID string // a shim does once what it is asked with the same id

	// Lost: the partition's log has lost something. A shim of whose present incarnation the log still has everything
	// need not begin another: it may have found out by itself, or been asked by another node.
	Lost bool

	Of events.Incarnation // if not 0: events of this incarnation are missing. A later one is as good as a new one.
}

// Handler answers for a shim. Its methods are called from several goroutines.
type Handler interface {
	Who() Shim

	// Resync begins a new incarnation and returns its number. It begins none if it did so for this id before, or if
	// the request's conditions do not hold.
	Resync(ctx context.Context, a ResyncRequest) (Shim, error)
}

// Serve answers for one rank until the returned function is called.
func Serve(ns *jetstream.Namespace, key events.RankKey, h Handler) (stop func(), err error) {
	p, err := ns.PartitionOf(key.Instance)
	if err != nil {
		return nil, err
	}
	subject, err := jetstream.ControlRankSubject(ns.Name(), p, key)
	if err != nil {
		return nil, err
	}
	answers, err := jetstream.AnswerSubject(ns.Name(), p, key, "")
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
			return jetstream.Response{Code: 404, Description: "another instance is meant"}
		case req.Op == opPresent:
			return jetstream.Response{Elsewhere: true}
		case req.Op == opWho:
			s = h.Who()
		case req.Op == opResync && req.ID != "":
			var err error // its own: several goroutines answer
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
			{Name: "partition", Subject: jetstream.ControlSubject(ns.Name(), p), Handler: answer},
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

// Who asks for the shim that serves a rank now. It returns nil if none answers.
func Who(ctx context.Context, ns *jetstream.Namespace, key events.RankKey) (*Shim, error) {
	return ask(ctx, ns, key, request{Op: opWho})
}

// Absent returns those of some ranks whose shims are not connected to NATS: nobody listens on their control subjects.
// Shims do not answer, so it costs one message for each rank.
func Absent(ctx context.Context, ns *jetstream.Namespace, ranks []events.RankKey) ([]events.RankKey, error) {
	body, err := json.Marshal(request{Op: opPresent})
	if err != nil {
		return nil, err
	}
	return ns.Absent(ctx, ranks, body)
}

// WhoAll asks all shims of a partition. It waits for answers for two seconds, since nobody knows how many there are.
func WhoAll(ctx context.Context, ns *jetstream.Namespace, p events.Partition) ([]Shim, error) {
	return gather(ctx, ns, p, request{Op: opWho})
}

// Resync asks the shim of one rank. It returns nil if none answers.
func Resync(ctx context.Context, ns *jetstream.Namespace, key events.RankKey, a ResyncRequest) (*Shim, error) {
	return ask(ctx, ns, key, request{Op: opResync, ID: a.ID, Lost: a.Lost, Of: a.Of})
}

// ask asks for one rank and takes the first answer. A shim that is there and does not answer is asked once more: it, or
// the whole machine, may have stood still for a moment.
func ask(ctx context.Context, ns *jetstream.Namespace, key events.RankKey, req request) (*Shim, error) {
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

// ResyncAll asks the shims of a partition: all of them, or those of one instance. It waits for answers for two seconds,
// since nobody knows how many there are.
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

// read reads answers. It skips an answer that cannot be read, or that names a rank that was not asked or is not the one
// that answered: a shim speaks for no other rank, and does not void the answers of others.
func read(replies []jetstream.Reply, asked func(Shim) bool) (shims []Shim) {
	for _, r := range replies {
		var s Shim
		if strictjson.Unmarshal(r.Body, &s) == nil && asked(s) && (r.From == nil || *r.From == s.Key()) {
			shims = append(shims, s)
		}
	}
	return shims
}
