package affinity

import (
	"math"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/fleet/shared"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// A binding is encoded as MessagePack values within the messages of [shared.Machine]: the last use, and the remaining
// milliseconds. The whole binding also has model, session, worker, rank and version.

const maxSeq = 1 << 62

// wireBinding is a received state of a binding.
type wireBinding struct {
	key      Key
	rank     events.RankKey
	is, used version
	left     time.Duration
}

func appendVersion(b []byte, v version) []byte {
	return msgp.AppendUint(msgp.AppendUint(b, v.Seq), v.Writer)
}

func appendBinding(b []byte, of *binding, now time.Duration, whole bool) []byte {
	left := (max(of.ends-now, 0) + time.Millisecond - 1) / time.Millisecond
	b = msgp.AppendUint(appendVersion(b, of.used), uint64(left))
	if !whole {
		return b
	}
	b = msgp.AppendStr(msgp.AppendStr(msgp.AppendStr(b, of.key.Model), of.key.Session), string(of.rank.Instance))
	return appendVersion(msgp.AppendUint(b, uint64(of.rank.Rank)), of.is)
}

func readVersion(r *shared.Reader) version {
	return version{r.Number(maxSeq), r.Number(math.MaxUint64)}
}

// readBinding decodes a binding and its hash, equal to [Machine.Hash].
func readBinding(r *shared.Reader, k shared.Key, whole bool) (w wireBinding, hash uint64) {
	w.used = readVersion(r)
	w.left = time.Duration(r.Number(uint64(MaxTTL/time.Millisecond))) * time.Millisecond
	hash = (&binding{at: k, used: w.used}).sum()
	if !whole {
		return w, hash
	}
	w.key = Key{r.Text(maxName), r.Text(MaxID)}
	w.rank = events.RankKey{Instance: events.WorkerID(r.Text(maxName)), Rank: events.Rank(r.Number(math.MaxUint32))}
	w.is = readVersion(r)
	r.OK(w.key.Session != "" && w.rank.Instance != "" && w.is.Seq > 0)
	return w, hash
}
