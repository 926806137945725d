package snapshot

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"sort"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Fetch returns the value of a key of the bucket. It returns an error that wraps ErrMissing if the bucket lacks the
// key. The caller must not change or keep the result.
type Fetch func(key string) ([]byte, error)

// maxInlineRanks is the maximum size of the table of ranks in the manifest, in bytes of JSON.
const maxInlineRanks = 300_000

func compareNames(a, b RankName) int {
	return cmp.Or(cmp.Compare(a.Instance, b.Instance), cmp.Compare(a.Rank, b.Rank))
}

func nameOf(k events.RankKey) RankName { return RankName{Text(k.Instance), k.Rank} }

func checkRanks(ranks []RankState) error {
	for i := 1; i < len(ranks); i++ {
		if compareNames(nameOf(ranks[i-1].Key()), nameOf(ranks[i].Key())) >= 0 {
			return fmt.Errorf("rank %s is there twice or out of order", ranks[i].Key())
		}
	}
	return nil
}

// sealRanks writes a table of more than limit bytes to chunks of about limit bytes. It returns true for a shorter
// table.
func sealRanks(ranks []RankState, limit int, put func(data []byte, from *RankName) error) (inline bool, err error) {
	encoded := make([][]byte, len(ranks))
	size := 0
	for i := range ranks {
		if encoded[i], err = json.Marshal(&ranks[i]); err != nil {
			return false, fmt.Errorf("%w: rank %s: %v", ErrImage, ranks[i].Key(), err)
		}
		size += len(encoded[i]) + 4
	}
	if size <= limit {
		return true, nil
	}
	var b []byte
	first := 0
	flush := func() error {
		from := nameOf(ranks[first].Key())
		return put(seal(kindRanks, append(b, ']'), nil), &from)
	}
	for i, e := range encoded {
		if len(b) > 0 && len(b)+len(e)+1 > limit {
			if err := flush(); err != nil {
				return false, err
			}
			b, first = b[:0], i
		}
		separator := byte(',')
		if len(b) == 0 {
			separator = '['
		}
		b = append(append(b, separator), e...)
	}
	return false, flush()
}

// decodeRanks decodes a chunk of ranks. It returns ErrCorrupt or ErrVersion.
func decodeRanks(data []byte) ([]RankState, error) {
	u, err := open(data, new(scratch))
	if err != nil {
		return nil, err
	}
	if u.kind != kindRanks {
		return nil, fmt.Errorf("%w: a chunk of %s instead of ranks", ErrCorrupt, u.kind)
	}
	var ranks []RankState
	if err = json.Unmarshal(u.fields, &ranks); err == nil {
		err = checkRanks(ranks)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: ranks: %v", ErrCorrupt, err)
	}
	return ranks, nil
}

// Ranks returns the table of ranks. It calls fetch only for a table in chunks. The field Rank of [events.Holding] in a
// restored image is a position in the table.
func Ranks(m *Manifest, fetch Fetch) ([]RankState, error) {
	if m.Ranks != nil || m.Counts.Ranks == 0 {
		return m.Ranks, nil
	}
	var all []RankState
	for _, ref := range m.chunksOf(kindRanks, kindRanks) {
		part, err := fetchRanks(&ref, fetch)
		if err != nil {
			return nil, err
		}
		all = append(all, part...)
	}
	if err := checkRanks(all); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrCorrupt, err)
	}
	if len(all) != m.Counts.Ranks {
		return nil, fmt.Errorf("%w: %d ranks instead of %d", ErrCorrupt, len(all), m.Counts.Ranks)
	}
	return all, nil
}

// FindRank returns the state of a rank and fetches at most one chunk. It returns false if the snapshot lacks the rank.
func FindRank(m *Manifest, key events.RankKey, fetch Fetch) (RankState, bool, error) {
	ranks, name := m.Ranks, nameOf(key)
	if chunks := m.chunksOf(kindRanks, kindRanks); len(chunks) > 0 {
		i := sort.Search(len(chunks), func(i int) bool { return compareNames(*chunks[i].From, name) > 0 })
		if i == 0 {
			return RankState{}, false, nil
		}
		var err error
		if ranks, err = fetchRanks(&chunks[i-1], fetch); err != nil {
			return RankState{}, false, err
		}
	}
	i, ok := slices.BinarySearchFunc(ranks, name,
		func(r RankState, n RankName) int { return compareNames(nameOf(r.Key()), n) })
	if !ok {
		return RankState{}, false, nil
	}
	return ranks[i], true, nil
}

func fetchRanks(ref *ChunkRef, fetch Fetch) ([]RankState, error) {
	data, err := fetch(ref.Key)
	if err != nil {
		return nil, fmt.Errorf("chunk %s: %w", ref.Key, err)
	}
	if err = ref.Verify(data); err != nil {
		return nil, err
	}
	ranks, err := decodeRanks(data)
	if err != nil {
		return nil, fmt.Errorf("chunk %s: %w", ref.Key, err)
	}
	return ranks, nil
}

// Verify compares a chunk with the hash in the manifest. The error is ErrCorrupt.
func (c *ChunkRef) Verify(data []byte) error {
	if h := hashOf(data); h != c.hash() {
		return fmt.Errorf("%w: chunk %s: its %d bytes have the hash %s", ErrCorrupt, c.Key, len(data), h)
	}
	return nil
}
