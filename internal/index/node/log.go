package node

import (
	"context"
	"log/slog"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// report logs and counts the effects of a partition's step.
func (n *Node) report(p events.Partition, e *effects) {
	log := n.cfg.Log
	if e.trouble != nil {
		n.outages.note(p, e.trouble)
	}
	if e.recovered {
		n.outages.note(p, nil)
	}
	if e.unfit != nil {
		log.Warn("the log differs from the applied log; restoring again", "partition", p, "found", e.unfit.String())
	}
	if e.restored != nil {
		reportRestored(log, p, e.restored)
	}
	if e.caughtUp {
		log.Debug("caught up", "partition", p, "seq", e.seq)
	}
	if e.reread {
		log.Error("messages were lost between the log and the index; the log is read again", "partition", p, "from",
			e.seq, "what_to_do", "nothing; report a second event of this kind: the log itself was whole")
	}
	if e.resynced {
		log.Info("resync is over", "partition", p)
	}
}

func reportRestored(log *slog.Logger, p events.Partition, r *Restored) {
	level := slog.LevelDebug
	switch {
	case r.Lost != "":
		log.Warn("resync needed", "partition", p, "why", r.Lost, "from", r.Seq+1)
	case r.Ranks > 0:
		level = slog.LevelInfo
	}
	log.Log(context.Background(), level, "restored", "partition", p, "seq", r.Seq, "ranks", r.Ranks, "holdings",
		r.Holdings, "took", r.Took)
}

// reportSave logs the result of a snapshot.
func (n *Node) reportSave(p events.Partition, s *api.SnapshotInfo, took time.Duration, err error) {
	if err != nil {
		n.cfg.Log.Warn("snapshot not written", "partition", p, "error", err, "what_to_do",
			"find out why NATS rejects writes (no room, no quorum); the log keeps all messages and the node tries again")
		return
	}
	n.cfg.Log.Debug("snapshot written", "partition", s.Partition, "generation", s.Generation, "seq", s.Seq, "bytes",
		s.Bytes, "written", s.Written, "took", took)
}

// reportUsage logs that a log, the bucket or the storage is 80 % full, and the begin and end of rejected writes.
func (n *Node) reportUsage(what string, before, now usage) {
	log := n.cfg.Log
	if now.filling() && !before.filling() {
		log.Warn("filling up: "+what, "bytes", now.used, "limit", now.limit, "what_to_do",
			"provide more room (--log-bytes, --snapshot-bytes, --store-bytes, the disk), or write snapshots sooner")
	}
	switch {
	case now.refused != nil && before.refused == nil:
		log.Error(what+" takes nothing more", "error", now.refused, "what_to_do",
			"make room (the disk, --store-bytes, --snapshot-bytes); events wait in the shims meanwhile")
	case now.refused == nil && before.refused != nil:
		log.Info(what + " can be written again")
	}
}

// reportRecreated logs the result of the recreation of a partition's stream.
func (n *Node) reportRecreated(p events.Partition, err error) {
	if err != nil {
		n.cfg.Log.Error("the log's stream is missing and cannot be created", "partition", p, "error", err, "what_to_do",
			"check that NATS has room and a quorum, and that the user may create streams")
		return
	}
	n.cfg.Log.Warn("the log's stream was missing and was recreated", "partition", p)
}

// reportResync logs a round of resync requests to the shims of a partition.
func (n *Node) reportResync(p events.Partition, why string, answered int, err error) {
	if err != nil {
		n.cfg.Log.Warn("the shims cannot be reached", "partition", p, "error", err, "what_to_do",
			"check that NATS responds, and that the user may publish on control subjects")
		return
	}
	n.cfg.Log.Info("resync requested from the shims", "partition", p, "why", why, "answered", answered)
}
