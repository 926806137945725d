package kube

import (
	"context"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/internal/base/loop"
)

// The durations of a Lease.
const (
	leaseFor   = 15 * time.Second
	renewEvery = 5 * time.Second
)

// lease contains the decoded fields of a Lease of coordination.k8s.io.
type lease struct {
	APIVersion string `json:"apiVersion,omitempty"`
	Kind       string `json:"kind,omitempty"`
	Meta       struct {
		Meta
		Labels map[string]string `json:"labels,omitempty"`
	} `json:"metadata"`
	Spec struct {
		Holder  string `json:"holderIdentity,omitempty"`
		Seconds int    `json:"leaseDurationSeconds,omitempty"`
		Renewed string `json:"renewTime,omitempty"`
	} `json:"spec"`
}

// Metadata returns the lease's metadata.
func (l lease) Metadata() *Meta { return &l.Meta.Meta }

// groupLabel is the label of a group's Leases.
const groupLabel = "kvatlas.dev/group"

// Membership keeps a Lease for a replica of a group, and watches the Leases of the others. Only one goroutine may call
// Members.
type Membership struct {
	client          *Client
	path            string
	group, identity string
	leases          *Copy[lease]
	failed          func(error)
	seen            map[string]renewal // by name of a Lease
}

// renewal is the last observed change of a Lease.
type renewal struct {
	version string
	at      time.Time
}

// NewMembership returns the membership of a replica in the group. identity is the replica's pod name. failed is called
// after each failure.
func NewMembership(client *Client, namespace, group, identity string, failed func(error)) *Membership {
	path := "/apis/coordination.k8s.io/v1/namespaces/" + url.PathEscape(namespace) + "/leases"
	return &Membership{client: client, path: path, group: group, identity: identity, failed: failed,
		leases: NewCopy[lease](client, Collection{path, groupLabel + "=" + group}, failed), seen: map[string]renewal{}}
}

// name returns the name of the replica's Lease.
func (m *Membership) name() string { return m.group + "-" + m.identity }

// Run renews the Lease until ctx is done, and then deletes it, so the other replicas continue at once.
func (m *Membership) Run(ctx context.Context) {
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		m.leases.Run(ctx)
	}()
	for {
		m.write(ctx, m.renew)
		if !loop.Wait(ctx, renewEvery) {
			break
		}
	}
	<-watched
	m.write(ctx, func(ctx context.Context) error {
		err := m.client.call(ctx, http.MethodDelete, m.path+"/"+m.name(), nil, nil, nil)
		if is(err, http.StatusNotFound) {
			return nil // the first renewal failed, or another client deleted the Lease
		}
		return err
	})
}

// write completes a write of the Lease even if ctx is done. An abandoned creation could reach the API server after the
// deletion and leave the Lease behind.
func (m *Membership) write(ctx context.Context, write func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if err := write(ctx); err != nil {
		m.failed(err)
	}
}

// renew writes the Lease, and creates it if it is missing. Only this replica writes the Lease, so the last write wins.
func (m *Membership) renew(ctx context.Context) error {
	var l lease
	err := m.client.call(ctx, http.MethodGet, m.path+"/"+m.name(), nil, nil, &l)
	if err != nil && !is(err, http.StatusNotFound) {
		return err
	}
	method, path := http.MethodPut, m.path+"/"+m.name()
	if err != nil {
		method, path = http.MethodPost, m.path
	}
	l.APIVersion, l.Kind = "coordination.k8s.io/v1", "Lease"
	l.Meta.Name, l.Meta.Labels = m.name(), map[string]string{groupLabel: m.group}
	l.Spec.Holder, l.Spec.Seconds = m.identity, int(leaseFor.Seconds())
	l.Spec.Renewed = time.Now().UTC().Format("2006-01-02T15:04:05.000000Z")
	return m.client.call(ctx, method, path, nil, &l, nil)
}

// Changed returns a channel that receives a value after a Lease has changed.
func (m *Membership) Changed() <-chan struct{} { return m.leases.Changed() }

// Members returns the live replicas, sorted. The replica itself is always included.
func (m *Membership) Members(now time.Time) []string {
	list, _ := m.leases.List() // none before the first answer
	live := []string{m.identity}
	there := map[string]bool{}
	for _, l := range list {
		there[l.Meta.Name] = true
		last := m.seen[l.Meta.Name]
		if last.version != l.Meta.ResourceVersion {
			last = renewal{l.Meta.ResourceVersion, now}
			m.seen[l.Meta.Name] = last
		}
		if l.Spec.Holder != m.identity && now.Sub(last.at) < leaseFor {
			live = append(live, l.Spec.Holder)
		}
	}
	for name := range m.seen {
		if !there[name] {
			delete(m.seen, name)
		}
	}
	slices.Sort(live)
	return slices.Compact(live)
}

// Owns reports whether an object with the UID belongs to this replica.
func (m *Membership) Owns(members []string, uid string) bool {
	return Owner(members, uid) == m.identity
}

// Owner returns the member that owns an object with the UID: the member with the highest rendezvous hash.
func Owner(members []string, uid string) (owner string) {
	var most uint64
	for _, member := range members {
		if score := xxh3.HashString(member + "\x00" + uid); owner == "" || score > most {
			owner, most = member, score
		}
	}
	return owner
}
