package load

import "github.com/zeebo/xxh3"

// Digest summarizes the requests of a table and their states. Equal digests mean equal loads.
type Digest struct {
	Requests      int    // under way, or with an id in use
	PrefillTokens int64  // to be prefilled
	Outputs       uint64 // output blocks
	Hash          uint64 // the sum of the hashes of all requests' keys and states
}

// Digest returns the digest of all requests. Each change updates it.
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

// digestOf hashes a record's key and state.
func (t *Table) digestOf(r *record) uint64 {
	t.scratch = appendState(t.scratch[:0], &r.state)
	return hashState(t.scratch, r.key)
}

// hashState hashes a key and an encoded state. The key determines the constant fields of a record.
func hashState(encoded []byte, k Key) uint64 {
	return xxh3.HashSeed(encoded, k.Owner^k.Seq*0x9E3779B97F4A7C15)
}
