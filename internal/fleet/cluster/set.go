package cluster

import (
	"fmt"
	"math/bits"
	"strconv"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// maxPartition is the maximum partition in a text.
const maxPartition = 65535

// Set is a set of partitions. The text form has ranges: "0-5,9". The zero value is empty. Copies share memory until one
// of them grows.
type Set []uint64

// SetOf returns a new set.
func SetOf(list ...events.Partition) (s Set) {
	for _, p := range list {
		s.Add(p)
	}
	return s
}

// Has reports whether p is in the set.
func (s Set) Has(p events.Partition) bool { return int(p/64) < len(s) && s[p/64]&(1<<(p%64)) != 0 }

// Add adds p to the set.
func (s *Set) Add(p events.Partition) {
	for len(*s) <= int(p/64) {
		*s = append(*s, 0)
	}
	(*s)[p/64] |= 1 << (p % 64)
}

// Remove removes p from the set.
func (s Set) Remove(p events.Partition) {
	if s.Has(p) {
		s[p/64] &^= 1 << (p % 64)
	}
}

// Len returns the number of partitions.
func (s Set) Len() (n int) {
	for _, w := range s {
		n += bits.OnesCount64(w)
	}
	return n
}

// List returns the partitions in order.
func (s Set) List() (list []events.Partition) {
	for i, w := range s {
		for ; w != 0; w &= w - 1 {
			list = append(list, events.Partition(64*i+bits.TrailingZeros64(w)))
		}
	}
	return list
}

// String returns the text form.
func (s Set) String() string {
	text, _ := s.MarshalText() // never fails
	return string(text)
}

// Phrase returns a phrase for a sentence: "partition 3", "partitions 0-5,9".
func (s Set) Phrase() string {
	if s.Len() == 1 {
		return "partition " + s.String()
	}
	return "partitions " + s.String()
}

func (s Set) MarshalText() ([]byte, error) {
	var b []byte
	list := s.List()
	for i := 0; i < len(list); {
		j := i
		for j+1 < len(list) && list[j+1] == list[j]+1 {
			j++
		}
		if len(b) > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(list[i]), 10)
		if j > i {
			b = append(b, '-')
			b = strconv.AppendUint(b, uint64(list[j]), 10)
		}
		i = j + 1
	}
	return b, nil
}

// UnmarshalText parses the text form.
func (s *Set) UnmarshalText(text []byte) error {
	var out Set
	if len(text) > 0 {
		for _, part := range strings.Split(string(text), ",") {
			from, to, ranged := strings.Cut(part, "-")
			if !ranged {
				to = from
			}
			first, err1 := strconv.ParseUint(from, 10, 32)
			last, err2 := strconv.ParseUint(to, 10, 32)
			if err1 != nil || err2 != nil || first > last || last > maxPartition {
				return fmt.Errorf("%.40q is not a range of partitions", part)
			}
			for p := first; p <= last; p++ {
				out.Add(events.Partition(p))
			}
		}
	}
	*s = out
	return nil
}
