package radix

// aliases are the names of blocks that have another name in the arena. A page of aliases belongs to a single owner, so
// the aliases of an owner can be listed. An owner without aliases has no page.
type aliases struct {
	all    array[alias] // page 0 has no owner
	owners []aliasList
	spare  []uint32 // pages without an owner
}

// alias is an owner's name for a block. The owner of a free alias is 0, and the name is the position of the next free
// alias of the page's owner.
type alias struct {
	name         uint64
	block, owner uint32
}

// aliasList has the aliases of an owner.
type aliasList struct {
	pages []uint32
	free  uint32 // first free alias; 0: none
	n     int
}

const (
	aliasPage = 64
	nobody    = 1<<32 - 1
)

// add stores an alias and returns the position.
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

// each calls f for every alias of an owner. f may remove the alias.
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
