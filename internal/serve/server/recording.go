package server

import (
	"context"
	"crypto/rand"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/choose/selection"
	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/faces/compat/dynamoselect"
	"github.com/kvatlas/kvatlas/internal/operate/recording"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Recording configures the recording of requests; see package recording.
type Recording struct {
	On    bool
	Bytes int64         // of the stream; 0: the default limit
	Age   time.Duration // of a record in the stream
	Span  uint32        // tokens of a name of a prompt
}

// openRecording opens the stream and the secret for recorded requests.
func (st *store) openRecording(ctx context.Context, s *Settings) (err error) {
	st.recording, err = st.ns.EnsureRecording(ctx, jetstream.RecordingConfig{MaxBytes: s.Recording.Bytes,
		Usual: usualRecording(s.Embedded), MaxAge: s.Recording.Age, Replicas: s.Replicas})
	if err != nil {
		return err
	}
	fresh := make([]byte, recording.SecretBytes)
	_, _ = rand.Read(fresh) // never fails
	st.secret, err = st.ns.Secret(ctx, fresh)
	return err
}

// usualRecording returns the default size of the recording: 1 GiB, and at most an eighth of the server's storage.
func usualRecording(server *natsserver.Server) int64 {
	const usual = 1 << 30
	if server == nil {
		return usual
	}
	return max(1<<20, min(usual, server.MaxStore()/8))
}

// newRecorder returns the recorder of requests, or nil if recording is off.
func (s *Server) newRecorder(st *store) (*recording.Recorder, error) {
	if !s.Recording.On {
		return nil, nil
	}
	keys, err := recording.NewKeys(st.secret)
	if err != nil {
		return nil, err
	}
	s.log.Info("requests are recorded as hashes", "tokens_of_a_name", s.Recording.Span, "age", s.Recording.Age)
	return recording.New(recording.Config{Node: s.ID, Keys: keys, Stream: st.recording, Span: s.Recording.Span,
		Log: s.log}), nil
}

// recordHook returns the function that records requests with their choices; nil if recording is off.
func (s *Server) recordHook() func(*selection.Observed) {
	if s.recorder == nil {
		return nil
	}
	return s.recordChoice
}

func (s *Server) recordChoice(o *selection.Observed) {
	q := o.Request
	r := recording.Observed{ID: q.RequestID, SessionID: q.SessionID, AdapterName: q.LoRA, Salt: q.CacheSalt,
		Sequence: o.Sequence, Request: recording.Request{Time: o.At.UnixMilli(), Model: q.Model, BlockSize: o.BlockSize,
			EngineHashes: q.SequenceHashes == nil && q.EngineHashes != nil, Tokens: o.Tokens,
			Output: uint64(q.ExpectedOutputTokens)}}
	if q.Pinned != nil || q.Workers != nil || q.Endpoints != nil {
		r.Flags |= recording.Pinned
	}
	if o.Out == nil {
		r.Flags |= recording.Refused
		s.recorder.Request(&r)
		return
	}
	out := o.Out
	r.Policy, r.Candidates, r.Place = out.Policy, uint32(out.Candidates), recordedPlace(out, o.Chosen)
	r.Cached, r.Computed = out.CachedTokens, out.EffectivePrefillTokens
	if out.Booked {
		r.Flags |= recording.Booked
	}
	if !out.Complete {
		r.Flags |= recording.Incomplete
	}
	if p := out.Prefill; p != nil {
		r.Flags |= recording.Disaggregated
		r.Prefill = recordedPlace(p, o.Prefill)
		r.Cached, r.Computed = p.CachedTokens, p.EffectivePrefillTokens
	}
	s.recorder.Request(&r)
}

func recordedPlace(out *api.Selection, c *routing.Candidate) recording.Place {
	p := recording.Place{Worker: string(out.Worker), Rank: uint32(out.Rank), Device: max(out.Device, out.Guessed),
		Host: out.Host, Disk: out.Disk + out.External, Shared: out.L3}
	if out.Guessed > 0 {
		p.Guessed = out.Guessed - min(out.Device, out.Guessed)
	}
	if c != nil {
		p.Requests, p.PrefillTokens, p.Blocks = c.ActiveRequests, c.ActivePrefillTokens, c.ActiveBlocks
	}
	return p
}

// recordEnd records the end of a request that this node has booked.
func (s *Server) recordEnd(of load.Model, r *load.Request) {
	if s.recorder == nil || !r.Ended || !r.Own || strings.HasSuffix(r.ID, api.PrefillID("")) ||
		dynamoselect.Tracked(of.Name) {
		return
	}
	s.recorder.End(r.ID, recording.End{Time: time.Now().UnixMilli(), Freed: r.Freed,
		Life: uint64(r.Life.Milliseconds()), FirstToken: uint64(r.FirstToken.Milliseconds()), Blocks: uint64(r.Outputs)})
}

// recordReport records the reuse that an engine has reported.
func (s *Server) recordReport(r *api.Report) {
	if s.recorder != nil {
		s.recorder.Report(r.RequestID, recording.Report{Time: time.Now().UnixMilli(), Cached: r.CachedTokens})
	}
}

// recordAnswer records the tokens of an answer.
func (s *Server) recordAnswer(id string, tokens uint64) {
	if s.recorder != nil {
		s.recorder.Answer(id, recording.Answer{Time: time.Now().UnixMilli(), Tokens: tokens})
	}
}

// recordingStatus returns the state of the recording for clients; nil if recording is off.
func (s *Server) recordingStatus() *api.RecordingStatus {
	if s.recorder == nil {
		return nil
	}
	c := s.recorder.Counts()
	out := &api.RecordingStatus{Records: c.Recorded, Stored: c.Stored, Dropped: c.Dropped,
		WaitingBytes: uint64(c.Waiting), Span: s.Recording.Span}
	if c.Failing != nil {
		out.Failing = c.Failing.Error()
	}
	return out
}

// recordingPatience is the longest wait of a status for the stream of the recording.
const recordingPatience = 500 * time.Millisecond

// addRecording adds the state of the recording's stream to a status.
func (s *Server) addRecording(ctx context.Context, status *api.Status) {
	if status.Recording == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, recordingPatience)
	defer cancel()
	i, err := s.recordings.Info(ctx)
	if err != nil {
		return // the status is without the stream
	}
	status.Recording.Stream = &api.RecordingStream{Batches: i.Batches, Bytes: i.Bytes, MaxBytes: i.MaxBytes,
		MaxAgeMS: uint64(i.MaxAge.Milliseconds()), Replicas: i.Replicas}
	if !i.Oldest.IsZero() && i.Batches > 0 {
		status.Recording.Stream.Oldest = &i.Oldest
	}
}
