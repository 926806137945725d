package snapshot

import (
	"strconv"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Generation numbers the snapshots of a partition, from 1.
type Generation uint64

// maxGeneration is the highest generation in a key, so that a higher number always exists.
const maxGeneration Generation = 1 << 53

// Key is a parsed key of the bucket.
//
//	p<partition>.manifest         the current generation's manifest; all writers compare and set this key
//	p<partition>.g<generation>    the unchanged manifest of an earlier generation
//	p<partition>.c<generation>.<hash>   a chunk: the generation of the first write, and the XXH3-128 in hex
type Key struct {
	Partition  events.Partition
	Type       KeyType
	Generation Generation // for an earlier manifest or a chunk
	Hash       Hash       // for a chunk
}

// KeyType is the type of the value under a key.
type KeyType uint8

const (
	currentKey KeyType = iota + 1
	EarlierKey
	ChunkKey
)

func (k Key) String() string {
	p := KeyPrefix(k.Partition)
	switch k.Type {
	case EarlierKey:
		return p + "g" + strconv.FormatUint(uint64(k.Generation), 10)
	case ChunkKey:
		return p + "c" + strconv.FormatUint(uint64(k.Generation), 10) + "." + k.Hash.String()
	}
	return p + "manifest"
}

// KeyPrefix returns the prefix of all keys of a partition. Keys of other partitions have different prefixes.
func KeyPrefix(p events.Partition) string { return "p" + strconv.FormatUint(uint64(p), 10) + "." }

// ManifestKey returns the key of a partition's current manifest.
func ManifestKey(p events.Partition) string { return Key{Partition: p, Type: currentKey}.String() }

// ParseKey parses a key. It returns false for keys of other packages.
func ParseKey(s string) (Key, bool) {
	head, rest, ok := strings.Cut(s, ".")
	if !ok || len(head) < 2 || len(rest) < 2 || head[0] != 'p' {
		return Key{}, false
	}
	p, err := strconv.ParseUint(head[1:], 10, 32)
	if err != nil {
		return Key{}, false
	}
	k := Key{Partition: events.Partition(p)}
	number := rest[1:]
	switch {
	case rest == "manifest":
		k.Type = currentKey
		return k, k.String() == s
	case rest[0] == 'g':
		k.Type = EarlierKey
	case rest[0] == 'c':
		k.Type = ChunkKey
		var hash string
		number, hash, _ = strings.Cut(number, ".")
		if k.Hash, ok = parseHash(hash); !ok {
			return Key{}, false
		}
	default:
		return Key{}, false
	}
	g, err := strconv.ParseUint(number, 10, 64)
	if err != nil || g > uint64(maxGeneration) {
		return Key{}, false
	}
	k.Generation = Generation(g)
	return k, k.String() == s
}
