package events

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// A type for each kind of number, so that the compiler keeps them apart.
type (
	// WorkerID names an engine instance: the string that a router addresses.
	WorkerID string

	// Rank is a data-parallel rank within one worker.
	Rank uint32

	// BlockHash is what an engine calls a block. It is opaque and compared only within one (worker, rank, incarnation).
	BlockHash uint64

	// LocalHash is the hash of one block's own tokens ([Hasher]).
	LocalHash uint64

	// SeqHash is the chained hash of a prefix ([SeqHashes]).
	SeqHash uint64

	// StreamSeq is a message's sequence in a partition's stream, from 1.
	StreamSeq uint64

	// EventID numbers the events of one (worker, rank, incarnation) without a break, from 1.
	EventID uint64

	// EngineSeq is the number that an engine gives its batches, from 0 (some from 1).
	EngineSeq uint64

	// Incarnation is one life of one engine process as its shim saw it. Within a (worker, rank)
	// a later life has the greater number; zero means none yet.
	Incarnation uint64

	// Partition is the number of a share of the log, from 0.
	Partition uint32

	// Millis is a point in time, in milliseconds since 1970 UTC. In the log it is the time at which the
	// stream took the message, so that every replica sees the same.
	Millis int64

	// GroupIndex is an engine's number for one of its KV-cache groups; 0 where the engine has but one.
	GroupIndex uint32
)

// RankKey is the identity of one (worker, rank): what every cursor, clear and count belongs to.
type RankKey struct {
	Instance WorkerID
	Rank     Rank
}

func (k RankKey) String() string {
	return string(k.Instance) + "/" + strconv.FormatUint(uint64(k.Rank), 10)
}

// Compare orders keys by instance, then rank: -1, 0 or 1 as k comes before, is or comes after other.
func (k RankKey) Compare(other RankKey) int {
	return cmp.Or(cmp.Compare(k.Instance, other.Instance), cmp.Compare(k.Rank, other.Rank))
}

// Tier is where a block lies. A wire constant: do not renumber.
type Tier uint8

// The tiers, in the order in which a prefix continues through them.
const (
	Device   Tier = 1 // the accelerator's own memory
	Host     Tier = 2 // pinned or plain host memory
	Disk     Tier = 3 // local disk
	External Tier = 4 // what the engine itself reports of a store beyond its host

	// AllTiers is the tier of a cleared event that spares none.
	AllTiers Tier = 0

	// NumTiers is how many tiers there are.
	NumTiers = 4
)

var tierNames = [...]string{"all", "device", "host", "disk", "external"}

func (t Tier) String() string {
	if int(t) < len(tierNames) {
		return tierNames[t]
	}
	return fmt.Sprintf("tier(%d)", uint8(t))
}

// Valid reports whether t names one of the four tiers.
func (t Tier) Valid() bool { return t >= Device && t <= External }

// maxMedium bounds the name of a medium, which is copied.
const maxMedium = 32

// tierOfMedium translates what an engine calls a medium. An absent medium is the device. It reports false for a name
// that no engine known to us uses.
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

// The kinds that engines announce. Full, MLA and sink attention are the main ones: only their blocks make up a prefix.
const (
	AttentionUnknown       Attention = 0 // not said: taken as main, unless the group's kind was learned before
	AttentionFull          Attention = 1
	AttentionMLA           Attention = 2
	AttentionSinkFull      Attention = 3
	AttentionSlidingWindow Attention = 4
	AttentionSlidingMLA    Attention = 5
	AttentionMamba         Attention = 6
	AttentionChunkedLocal  Attention = 7
	AttentionEncoderOnly   Attention = 8
	AttentionCross         Attention = 9
	AttentionOther         Attention = 10 // a name that we do not know: never main
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

// String is what vLLM calls the kind.
func (a Attention) String() string {
	for name, kind := range attentionNames {
		if kind == a && name != "" {
			return name
		}
	}
	return "other"
}

// Windowed reports whether groups of this kind need what their window or chunk says of a prefix, and no more.
func (a Attention) Windowed() bool {
	return a == AttentionSlidingWindow || a == AttentionSlidingMLA || a == AttentionChunkedLocal
}

// Bounds reports whether groups of this kind, which are no part of a prefix, decide how long it can be.
func (a Attention) Bounds() bool { return a.Windowed() || a == AttentionMamba }

// Main reports whether blocks of this kind make up a prefix.
func (a Attention) Main() bool { return a <= AttentionSinkFull }
