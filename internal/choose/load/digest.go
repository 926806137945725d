package load

import "github.com/zeebo/xxh3"

// Digest is equal for two tables with the same requests in the same states. Equal digests mean equal loads.
type Digest struct {
	Requests      int    // under way, and ids that are taken
	PrefillTokens int64  // to be prefilled
	Outputs       uint64 // output blocks
	Hash          uint64 // the sum of hashes of all requests' keys and states
}

// Digest is the digest of all requests. It is kept with each change.
func (t *Table) Digest() Digest { return t.sum }

func (d *Digest) add(r *record, hash uint64) {
	r.digest = hash
	d.Requests++
	d.Hash += hash
	if !r.gone {
		d.PrefillTokens += r.pending()
		d.Outputs += r.outputs()
	}
}

func (d *Digest) sub(r *record) {
	d.Requests--
	d.Hash -= r.digest
	if !r.gone {
		d.PrefillTokens -= r.pending()
		d.Outputs -= r.outputs()
	}
}

// digestOf hashes a record's key and state. What does not change in a record follows from its key.
func (t *Table) digestOf(r *record) uint64 {
	t.scratch = appendState(t.scratch[:0], &r.state)
	return xxh3.HashSeed(t.scratch, r.key.Origin^r.key.Seq*0x9E3779B97F4A7C15)
}
