package simnet

import (
	"container/heap"
	"math/rand/v2"
	"time"
)

// Node is the place of a state machine in a [Network].
type Node struct {
	Place    int           // index in Network.Nodes
	Dead     bool          // another node has replaced the node
	Group    int           // of connected nodes
	Skew     time.Duration // lead of the node's clock
	Received int           // bytes
}

// Self returns the place of the embedding state machine.
func (n *Node) Self() *Node { return n }

// Machine is the state machine of a node. Times are those of the node's clock.
type Machine[M any] interface {
	Self() *Node // by embedding Node
	Origin() uint64
	Wake() time.Duration // time of the next Step
	Step(now time.Duration) []M
	Receive(now time.Duration, data []byte)
}

// Message is the constraint of messages: to the node with the origin To, or to all nodes if To is 0. A sender also
// receives its own messages.
type Message interface {
	~struct {
		To   uint64
		Data []byte
	}
}

// Network has nodes in virtual time, and delivers their messages. The zero values of the faults mean a network without
// faults.
type Network[N Machine[M], M Message] struct {
	*rand.Rand
	Now   time.Duration
	Nodes []N

	Loss, Twice float64       // shares of lost and of duplicated messages
	Delay       time.Duration // greatest delay
	Ordered     bool          // messages between two nodes keep their order

	Published, Received int      // bytes of all messages
	Largest             int      // bytes of the largest message
	Keep                bool     // fills Sent
	Sent                [][]byte // messages

	flights flights
	serial  int
	last    map[[2]int]time.Duration // by sender and receiver: the last arrival, if Ordered
}

// usualDelay is the greatest delay of a network without faults.
const usualDelay = 2 * time.Millisecond

// New returns a network without nodes.
func New[N Machine[M], M Message](seed uint64) Network[N, M] {
	return Network[N, M]{Rand: rand.New(rand.NewPCG(seed, 9)), Delay: usualDelay, last: map[[2]int]time.Duration{}}
}

// Start puts a node in the place of another node, which is dead from then on, or in a new place.
func (w *Network[N, M]) Start(place int, n N) {
	if n.Self().Place = place; place == len(w.Nodes) {
		w.Nodes = append(w.Nodes, n)
		return
	}
	before := w.Nodes[place].Self()
	before.Dead, n.Self().Group = true, before.Group
	w.Nodes[place] = n
}

// Run advances the time.
func (w *Network[N, M]) Run(d time.Duration) {
	for end := w.Now + d; ; {
		next := end
		for _, n := range w.Nodes {
			next = min(next, n.Wake()-n.Self().Skew)
		}
		if len(w.flights) > 0 {
			next = min(next, w.flights[0].at)
		}
		w.Now = max(w.Now, next)
		for len(w.flights) > 0 && w.flights[0].at <= w.Now {
			f := heap.Pop(&w.flights).(flight)
			n := w.Nodes[f.to]
			w.Received += len(f.data)
			n.Self().Received += len(f.data)
			n.Receive(w.Now+n.Self().Skew, f.data)
		}
		for _, n := range w.Nodes {
			if now := w.Now + n.Self().Skew; n.Wake() <= now {
				for _, m := range n.Step(now) {
					w.publish(n, m)
				}
			}
		}
		if w.Now >= end {
			return
		}
	}
}

func (w *Network[N, M]) publish(from N, message M) {
	m := struct {
		To   uint64
		Data []byte
	}(message)
	w.Published += len(m.Data)
	w.Largest = max(w.Largest, len(m.Data))
	if w.Keep {
		w.Sent = append(w.Sent, m.Data)
	}
	for i, n := range w.Nodes {
		if n.Self().Group != from.Self().Group || m.To != 0 && m.To != n.Origin() {
			continue
		}
		copies := 1
		if w.Float64() < w.Twice {
			copies = 2
		}
		for range copies {
			if w.Float64() < w.Loss {
				continue
			}
			w.serial++
			at := w.Now + time.Duration(w.Int64N(int64(w.Delay)))
			if len(w.Nodes) > 8 { // fewer steps: each step visits all nodes
				at = at.Truncate(time.Millisecond) + time.Millisecond
			}
			if way := [2]int{from.Self().Place, i}; w.Ordered {
				at = max(at, w.last[way])
				w.last[way] = at
			}
			heap.Push(&w.flights, flight{at, w.serial, i, m.Data})
		}
	}
}

// Heal ends all faults except for dead nodes. Messages on their way arrive soon.
func (w *Network[N, M]) Heal() {
	w.Loss, w.Twice, w.Delay = 0, 0, usualDelay
	for _, n := range w.Nodes {
		n.Self().Group = 0
	}
	for i := range w.flights {
		w.flights[i].at = min(w.flights[i].at, w.Now+w.Delay)
	}
	heap.Init(&w.flights)
	clear(w.last)
}

// flight is a message on its way.
type flight struct {
	at     time.Duration
	serial int
	to     int // place
	data   []byte
}

type flights []flight

func (f flights) Len() int { return len(f) }
func (f flights) Less(i, j int) bool {
	return f[i].at < f[j].at || f[i].at == f[j].at && f[i].serial < f[j].serial
}
func (f flights) Swap(i, j int) { f[i], f[j] = f[j], f[i] }
func (f *flights) Push(x any)   { *f = append(*f, x.(flight)) }
func (f *flights) Pop() any {
	x := (*f)[len(*f)-1]
	*f = (*f)[:len(*f)-1]
	return x
}
