package routesim

// event is an event in virtual time.
type event struct {
	at     micros
	number int // in the order of scheduling
	do     func() error
}

func (e *event) before(o *event) bool {
	return e.at < o.at || e.at == o.at && e.number < o.number
}

// queue is a binary heap of events by time. Events of the same time run in the order of scheduling.
type queue struct {
	events []event
	pushed int
}

// push plans an event.
func (q *queue) push(at micros, do func() error) {
	q.events = append(q.events, event{at, q.pushed, do})
	q.pushed++
	list := q.events
	for i := len(list) - 1; i > 0 && list[i].before(&list[(i-1)/2]); i = (i - 1) / 2 {
		list[i], list[(i-1)/2] = list[(i-1)/2], list[i]
	}
}

// pop removes and returns the first event.
func (q *queue) pop() event {
	list := q.events
	top, n := list[0], len(list)-1
	list[0], list[n] = list[n], event{}
	list = list[:n]
	for i := 0; ; {
		c := 2*i + 1
		if c >= n {
			break
		}
		if c+1 < n && list[c+1].before(&list[c]) {
			c++
		}
		if !list[c].before(&list[i]) {
			break
		}
		list[i], list[c] = list[c], list[i]
		i = c
	}
	q.events = list
	return top
}
