package load

// queue is a heap of records by deadline.
type queue []*record

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].deadline < q[j].deadline }
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].due, q[j].due = i, j
}

func (q *queue) Push(x any) {
	r := x.(*record)
	r.due = len(*q)
	*q = append(*q, r)
}

func (q *queue) Pop() any {
	last := len(*q) - 1
	r := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	return r
}
