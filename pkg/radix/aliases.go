package radix

// aliases are the names of blocks where the arena has another name. They lie in pages of one owner each, so that an
// owner's can be listed; an owner without any has no page.
type aliases struct {
	all    array[alias] // page 0 is nobody's
	owners []aliasList
	spare  []uint32 // pages of nobody
}

// alias is an owner's name for a block. Of one that is to be used again the owner is nobody, and the name says where
// the next such of the page's owner is.
type alias struct {
	name         uint64
	block, owner uint32
}

// aliasList is what one owner has of aliases.
type aliasList struct {
	pages []uint32
	free  uint32 // the first that is to be used again; 0: there is none
	n     int
}

const (
	aliasPage = 64
	nobody    = 1<<32 - 1
)

// add gives an alias a place.
func (l *aliases) add(m *memory, a alias) uint32 {
	for int(a.owner) >= len(l.owners) {
		l.owners = append(l.owners, aliasList{})
	}
	own := &l.owners[a.owner]
	if own.free == 0 {
		l.addPage(m, own)
	}
	i := own.free
	own.free = uint32(l.all.s[i].name)
	own.n++
	l.all.s[i] = a
	return i
}

func (l *aliases) addPage(m *memory, own *aliasList) {
	if n := len(l.all.s) / aliasPage; len(l.spare) == 0 {
		l.all.grow(m, max(n+n/4, n+1, 2)*aliasPage, 0)
		for p := len(l.all.s)/aliasPage - 1; p >= max(n, 1); p-- {
			l.spare = append(l.spare, uint32(p))
		}
	}
	p := l.spare[len(l.spare)-1]
	l.spare = l.spare[:len(l.spare)-1]
	own.pages = append(own.pages, p)
	for i := uint32(0); i < aliasPage; i++ {
		l.all.s[p*aliasPage+i] = alias{name: uint64(own.free), owner: nobody}
		own.free = p*aliasPage + i
	}
}

func (l *aliases) remove(i uint32) {
	own := &l.owners[l.all.s[i].owner]
	l.all.s[i] = alias{name: uint64(own.free), owner: nobody}
	own.free = i
	if own.n--; own.n == 0 {
		l.spare = append(l.spare, own.pages...)
		*own = aliasList{}
	}
}

// each calls f for every alias of an owner. f may have those taken away for which it has been called.
func (l *aliases) each(owner uint32, f func(i uint32, a alias)) {
	if int(owner) >= len(l.owners) {
		return
	}
	for _, p := range l.owners[owner].pages {
		for i := p * aliasPage; i < (p+1)*aliasPage; i++ {
			if a := l.all.s[i]; a.owner == owner {
				f(i, a)
			}
		}
	}
}

func (l *aliases) bytes() int64 { return l.all.bytes() + int64(len(l.owners))*40 }
