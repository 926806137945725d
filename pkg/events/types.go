package events

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// Numbers of different kinds have different types, so the compiler rejects mistakes.
type (
	// WorkerID identifies an engine instance. Routers address workers by this string.
	WorkerID string

	// Rank is a data-parallel rank within one worker.
	Rank uint32

	// BlockHash is an engine's name of a block. The hash is opaque, and comparable only within a (worker, rank,
	// incarnation).
	BlockHash uint64

	// LocalHash is the hash of one block's own tokens ([Hasher]).
	LocalHash uint64

	// SeqHash is the chained hash of a prefix ([SeqHashes]).
	SeqHash uint64

	// SessionHash is the hash of a session's id ([HashSession]); 0: none.
	SessionHash uint64

	// StreamSeq is a message's sequence in a partition's stream, from 1.
	StreamSeq uint64

	// EventID numbers the events of one (worker, rank, incarnation) without gaps, from 1.
	EventID uint64

	// EngineSeq is an engine's number of a message, from 0 (in some engines from 1).
	EngineSeq uint64

	// Incarnation identifies one run of an engine process. Within a (worker, rank), later runs have greater numbers. Zero
	// means that no run is known.
	Incarnation uint64

	// Partition is the number of a partition of the log, from 0.
	Partition uint32

	// Millis is a point in time, in milliseconds since 1970 UTC. In the log this is the stream's time of the message,
	// equal for all replicas.
	Millis int64

	// GroupIndex is an engine's number for a KV-cache group; 0 in an engine with a single group.
	GroupIndex uint32
)

// RankKey identifies one (worker, rank). Every cursor, clear and count belongs to a rank.
type RankKey struct {
	Instance WorkerID
	Rank     Rank
}

func (k RankKey) String() string {
	return string(k.Instance) + "/" + strconv.FormatUint(uint64(k.Rank), 10)
}

// Compare orders keys by instance, then by rank. It returns -1, 0 or 1, like [cmp.Compare].
func (k RankKey) Compare(other RankKey) int {
	return cmp.Or(cmp.Compare(k.Instance, other.Instance), cmp.Compare(k.Rank, other.Rank))
}

// Tier is the kind of memory that holds a block. A wire constant: do not renumber.
type Tier uint8

// The tiers, in the order of a prefix's continuation.
const (
	Device   Tier = 1 // the accelerator's own memory
	Host     Tier = 2 // pinned or plain host memory
	Disk     Tier = 3 // local disk
	External Tier = 4 // a store beyond the host, as the engine itself reports it

	// AllTiers is the tier of a cleared event for all tiers.
	AllTiers Tier = 0

	// NumTiers is the number of tiers.
	NumTiers = 4
)

var tierNames = [...]string{"all", "device", "host", "disk", "external"}

func (t Tier) String() string {
	if int(t) < len(tierNames) {
		return tierNames[t]
	}
	return fmt.Sprintf("tier(%d)", uint8(t))
}

// Valid reports whether t is one of the four tiers.
func (t Tier) Valid() bool { return t >= Device && t <= External }

// maxMedium bounds the length of a medium's name, since it is copied.
const maxMedium = 32

// tierOfMedium translates an engine's name of a medium. An absent medium is the device. tierOfMedium returns false for
// a name that no known engine uses. A name that only SGLang uses is also in ofSGLang.
func tierOfMedium(medium string) (Tier, bool) {
	if len(medium) > maxMedium {
		return 0, false
	}
	switch strings.ToUpper(medium) {
	case "", "GPU", "DEVICE":
		return Device, true
	case "CPU", "CPU_PINNED", "CPU_TIER1", "HOST", "HOST_PINNED":
		return Host, true
	case "CPU_TIER2", "DISK", "NVME", "STORAGE", "FS", "OBJ":
		return Disk, true
	case "EXTERNAL", "NETWORK", "REMOTE", "SHARED":
		return External, true
	}
	return 0, false
}

// Attention is the kind of attention that a KV-cache group serves. A wire constant: do not renumber.
type Attention uint8

// The kinds that engines announce. Full, MLA and sink attention are the main kinds: a prefix consists of blocks of
// these kinds.
const (
	AttentionUnknown       Attention = 0 // not announced: counts as main, unless the group's kind was learned before
	AttentionFull          Attention = 1
	AttentionMLA           Attention = 2
	AttentionSinkFull      Attention = 3
	AttentionSlidingWindow Attention = 4
	AttentionSlidingMLA    Attention = 5
	AttentionMamba         Attention = 6
	AttentionChunkedLocal  Attention = 7
	AttentionEncoderOnly   Attention = 8
	AttentionCross         Attention = 9
	AttentionOther         Attention = 10 // an unknown name: never main
)

var attentionNames = map[string]Attention{
	"":                        AttentionUnknown,
	"unknown":                 AttentionUnknown,
	"full_attention":          AttentionFull,
	"mla_attention":           AttentionMLA,
	"sink_full_attention":     AttentionSinkFull,
	"sliding_window":          AttentionSlidingWindow,
	"sliding_window_mla":      AttentionSlidingMLA,
	"mamba":                   AttentionMamba,
	"chunked_local_attention": AttentionChunkedLocal,
	"encoder_only_attention":  AttentionEncoderOnly,
	"cross_attention":         AttentionCross,
}

// attentionOf translates an engine's kv_cache_spec_kind.
func attentionOf(kind string) Attention {
	if a, ok := attentionNames[kind]; ok {
		return a
	}
	return AttentionOther
}

// String returns vLLM's name of the kind.
func (a Attention) String() string {
	for name, kind := range attentionNames {
		if kind == a && name != "" {
			return name
		}
	}
	return "other"
}

// Windowed reports whether groups of this kind need only the window or chunk at the end of a prefix.
func (a Attention) Windowed() bool {
	return a == AttentionSlidingWindow || a == AttentionSlidingMLA || a == AttentionChunkedLocal
}

// Bounds reports whether groups of this kind limit the length of a prefix without being a part of the prefix.
func (a Attention) Bounds() bool { return a.Windowed() || a == AttentionMamba }

// Main reports whether a prefix consists of blocks of this kind.
func (a Attention) Main() bool { return a <= AttentionSinkFull }
