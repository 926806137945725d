package jetstream

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// TestForbiddenIsRefused tries, on a real server with generated permissions, what each kind of user must not do.
func TestForbiddenIsRefused(t *testing.T) {
	t.Parallel()
	shim, err := ShimGrant("a", 4, "w1")
	if err != nil {
		t.Fatal(err)
	}
	store, err := StoreGrant("a", "master:9003")
	if err != nil {
		t.Fatal(err)
	}
	w1, err := PartitionOf("w1", 4)
	if err != nil {
		t.Fatal(err)
	}
	p, other := decimal(uint64(w1)), decimal(uint64((w1+1)%4))
	grants := []Grant{shim, store, AnyShimGrant("a", 4), NodeGrant("a"), ReaderGrant("a"), OperatorGrant("a")}
	account := Account{Name: "A"}
	for _, g := range grants {
		account.Users = append(account.Users, User{Grant: g, Password: "x"})
	}
	srv := configServer(t, "jetstream: enabled\n"+AccountsConfig([]Account{account}))

	nobody := []string{"kv.v1.b.ev.0.w1.0", "$KV.kvatlas_b.namespace", "$KV.kvatlas_b_snap.p0.m.1", "kv.v1.b.q.find",
		"kv.v1.b.node.n1.find", "kv.v1.b.ctl.0", "_INBOX.x", "$SYS.REQ.SERVER.PING"}
	shims := append(nobody, "$JS.API.STREAM.PURGE.KV_EVENTS_a_"+p, "$JS.API.STREAM.DELETE.KV_EVENTS_a_"+p,
		"$JS.API.STREAM.CREATE.x", "$JS.API.CONSUMER.CREATE.KV_EVENTS_a_"+p+".x",
		"$KV.kvatlas_a.namespace", "$KV.kvatlas_a_snap.p0.m.1", "$KV.kvatlas_a_nodes.n", "kv.v1.a.nodes",
		"$KV.kvatlas_a_workers.operator.w1", "kv.v1.a.q.worker_change",
		"kv.v1.a.q.find", "kv.v1.a.node.n1.find", "_INBOX_node.x",
		// Nothing is read by sequence, nor from snapshots.
		"$JS.API.STREAM.MSG.GET.KV_EVENTS_a_"+
			p, "$JS.API.STREAM.MSG.GET.KV_kvatlas_a_workers", "$JS.API.STREAM.MSG.GET.KV_kvatlas_a_snap",
		"$JS.API.DIRECT.GET.KV_EVENTS_a_"+
			p, "$JS.API.DIRECT.GET.KV_kvatlas_a_workers", "$JS.API.DIRECT.GET.KV_kvatlas_a_snap",
		"$JS.API.DIRECT.GET.KV_kvatlas_a_snap.$KV.kvatlas_a_snap.p"+p+
			".manifest", "$JS.API.STREAM.INFO.KV_kvatlas_a_snap",
		"$JS.API.CONSUMER.CREATE.KV_EVENTS_a_"+p, "$JS.API.CONSUMER.CREATE.KV_EVENTS_a_"+p+".x.kv.v1.a.ev."+p+".w1.0")
	for _, c := range []struct {
		grant              Grant
		publish, subscribe []string
	}{
		{shim, append(shims, "kv.v1.a.store.master=3A9003", "kv.v1.a.ev."+p+".w2.0", "kv.v1.a.ev."+other+".w1.0",
			"kv.v1.a.ctl."+p+".w2.0", "$KV.kvatlas_a_workers."+p+".w2.0",
			"$JS.API.STREAM.MSG.GET.KV_EVENTS_a_"+other, "$JS.API.STREAM.INFO.KV_EVENTS_a_"+other,
			// Another worker's cursor, lease, and what snapshots know of it.
			"$JS.API.DIRECT.GET.KV_EVENTS_a_"+p+".kv.v1.a.ev."+p+".w2.0", "$JS.API.DIRECT.GET.KV_EVENTS_a_"+p+
				".kv.v1.a.ev."+p+".*.0",
			"$JS.API.DIRECT.GET.KV_EVENTS_a_"+p+".kv.v1.a.ev."+p+".>",
			"$JS.API.DIRECT.GET.KV_kvatlas_a_workers.$KV.kvatlas_a_workers."+p+".w2.0", "kv.v1.a.recall."+p+".w2.0"),
			[]string{">", "kv.v1.a.ev.>", "_INBOX.>", "_INBOX_node.>", "kv.v1.a.q.find", "kv.v1.a.node.n1.find",
				"kv.v1.a.ctl.>", "kv.v1.a.recall.>"}},
		{AnyShimGrant("a", 4), shims, []string{">", "kv.v1.a.ev.>", "_INBOX_node.>", "kv.v1.a.q.find",
			"kv.v1.a.node.n1.find", "kv.v1.a.recall.>", "kv.v1.b.>"}},
		{store, append(shims, "kv.v1.a.store.x", "kv.v1.b.store.master=3A9003", "kv.v1.a.ev."+p+".w1.0", "kv.v1.a.ctl."+
			p, "$JS.API.INFO"), []string{">", "kv.v1.a.>", "kv.v1.a.store.>", "_INBOX.>", "$SRV.>"}},
		{NodeGrant("a"), nobody, []string{">", "kv.v1.b.>", "_INBOX.>", "_INBOX_reader.>", "$KV.>"}},
		{ReaderGrant("a"), append(nobody, "kv.v1.a.ev."+p+".w1.0", "kv.v1.a.q.snapshot", "kv.v1.a.ctl.0",
			"kv.v1.a.q.worker_register", "kv.v1.a.q.worker_change", "kv.v1.a.q.worker_remove",
			"kv.v1.a.node.n1.find", "kv.v1.a.nodes", "$KV.kvatlas_a.namespace", "$JS.API.STREAM.INFO.KV_EVENTS_a_0",
			"$JS.API.STREAM.MSG.GET.KV_EVENTS_a_0", "$JS.API.STREAM.PURGE.KV_EVENTS_a_0", "_INBOX_node.x"),
			[]string{">", "kv.v1.a.ev.>", "kv.v1.a.q.find", "kv.v1.a.node.>", "_INBOX_node.>", "$SRV.>"}},
		{OperatorGrant("a"), append(nobody, "kv.v1.a.ev."+p+".w1.0", "kv.v1.a.q.snapshot", "kv.v1.a.ctl.0",
			"$KV.kvatlas_a_workers.operator.w1", "$KV.kvatlas_a_workers."+p+".w1.0", "kv.v1.a.node.n1.worker_remove"),
			[]string{">", "kv.v1.a.q.worker_change", "_INBOX_node.>", "_INBOX_reader.>", "$SRV.>"}},
	} {
		refused := make(chan error, 1)
		nc := plainConn(t, srv.ClientURL(), nats.UserInfo(c.grant.User, "x"), nats.CustomInboxPrefix(c.grant.Inbox),
			nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { refused <- err }))
		expect := func(what, subject string) {
			t.Helper()
			select {
			case err := <-refused:
				if !errors.Is(err, nats.ErrPermissionViolation) || !strings.Contains(err.Error(), `"`+subject+`"`) {
					t.Errorf("%s: %s %s: %v", c.grant.User, what, subject, err)
				}
			case <-time.After(patience):
				t.Fatalf("%s may %s %s", c.grant.User, what, subject)
			}
		}
		for _, subject := range c.publish {
			if err := nc.Publish(subject, nil); err != nil {
				t.Fatal(err)
			}
			expect("publish", subject)
		}
		for _, subject := range c.subscribe {
			if _, err := nc.SubscribeSync(subject); err != nil {
				t.Fatal(err)
			}
			expect("subscribe to", subject)
		}
	}
}
