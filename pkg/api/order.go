package api

import (
	"cmp"
	"encoding/binary"
	"slices"
	"strings"
)

// compare orders workers as in answers: best first, guesses last.
func (o *Overlap) compare(p *Overlap) int {
	switch {
	case o.Device != p.Device:
		return cmp.Compare(p.Device, o.Device)
	case o.Host != p.Host:
		return cmp.Compare(p.Host, o.Host)
	case o.Disk != p.Disk:
		return cmp.Compare(p.Disk, o.Disk)
	case o.External != p.External:
		return cmp.Compare(p.External, o.External)
	case o.L3 != p.L3:
		return cmp.Compare(p.L3, o.L3)
	case o.Guessed != p.Guessed:
		return cmp.Compare(p.Guessed, o.Guessed)
	case o.Instance != p.Instance:
		return cmp.Compare(o.Instance, p.Instance)
	}
	return cmp.Compare(o.Rank, p.Rank)
}

// place is the place of an overlap in a list during a sort. Its keys decide nearly always.
type place struct {
	depths uint64 // of device and host memory, inverted so that the best is first
	name   uint64 // the first bytes of the instance after the common prefix; 0 if lower tiers decide
	at     uint32
}

// SortOverlaps sorts workers as in answers. An Overlap is large, so SortOverlaps sorts their places and then moves each
// overlap once.
func SortOverlaps(list []Overlap) {
	var few [64]place // on the stack
	places := slices.Grow(few[:0], len(list))
	sorted, more := true, uint32(0)
	var common string // common prefix of all instances
	for i := range list {
		o := &list[i]
		places = append(places, place{depths: ^(uint64(o.Device)<<32 | uint64(o.Host)), at: uint32(i)})
		more |= o.Disk | o.External | o.L3 | o.Guessed
		if i == 0 {
			common = string(o.Instance)
			continue
		}
		for !strings.HasPrefix(string(o.Instance), common) {
			common = common[:len(common)-1]
		}
		sorted = sorted && list[i-1].compare(o) <= 0
	}
	if sorted {
		return
	}
	if more == 0 {
		for i := range places {
			var name [8]byte
			copy(name[:], list[i].Instance[len(common):])
			places[i].name = binary.BigEndian.Uint64(name[:])
		}
	}
	slices.SortFunc(places, func(a, b place) int {
		switch {
		case a.depths != b.depths:
			return cmp.Compare(a.depths, b.depths)
		case a.name != b.name:
			return cmp.Compare(a.name, b.name)
		}
		return list[a.at].compare(&list[b.at])
	})
	const done = ^uint32(0)
	for i := range places { // each cycle of the permutation, from its first element
		if places[i].at == done {
			continue
		}
		first, to := list[i], i
		for from := int(places[to].at); from != i; from = int(places[to].at) {
			list[to] = list[from]
			places[to].at = done
			to = from
		}
		list[to] = first
		places[to].at = done
	}
}
