package jetstream

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvatlas/kvatlas/internal/base/hooks"
	"github.com/kvatlas/kvatlas/internal/base/loop"
)

// ConnOptions says which server, as whom, and what to do when it goes. The zero value of each field is a good
// choice. Reading NATS_URL and its like from the environment is left to callers.
type ConnOptions struct {
	URLs []string // servers to try; default nats://127.0.0.1:4222. "tls://" asks for TLS

	// Server is a NATS server in this process, such as a natsserver.Server. URLs and TLS are ignored if it is set.
	Server nats.InProcessConnProvider

	Name string // how the server lists this connection; default "kvatlas"

	// As whom. What is empty is not sent; at most one of the kinds should be set.
	CredsFile string // JWT and seed, as nsc writes it
	NkeyFile  string // file with an nkey seed
	User      string
	Password  string
	Token     string

	// TLS by files. CAFile alone verifies the server; CertFile and KeyFile together identify the client.
	CAFile   string
	CertFile string
	KeyFile  string

	// InboxPrefix is the first part of all subjects on which this client takes replies; default "_INBOX". A
	// prefix of one's own and permissions that say so keep users from reading each other's replies.
	InboxPrefix string

	// Domain is the JetStream domain, where JetStream is reached through a leaf node.
	Domain string

	// Core asks for no JetStream, which need not be there then: the connection is good for [Conn.Listen],
	// [Conn.Request], and for clients of services ([Conn.NATS]).
	Core bool

	// Wait says what Connect does while no server can be reached: false returns the error at once, true tries again
	// until the context ends. A refusal (credentials, TLS) is always returned at once. A JetStream without a leader is
	// waited for in both cases.
	Wait bool

	ConnectTimeout time.Duration // for one attempt to connect to one server; default 3 s
	AttemptTimeout time.Duration // how long one request to the JetStream API waits before it is sent again; default 2 s

	// Patience is how long one call is repeated while JetStream is unavailable; then that is the error. Default: until
	// its context ends.
	Patience time.Duration

	Hooks ConnHooks
}

// ConnHooks are called from one goroutine of the connection, one at a time; they must return soon. Each may be nil.
type ConnHooks struct {
	Disconnected func(err error)  // the connection is lost and will be sought for ever
	Reconnected  func(url string) // it is back
	AsyncError   func(err error)  // something that no call can return: a refused subject, a slow consumer
	Waiting      func(err error)  // Connect found no server, or no JetStream (ErrNoLeader), and tries again
}

// Conn is one connection to NATS that never gives up. Its methods may be called from any goroutine.
type Conn struct {
	nc       *nats.Conn
	api      string // "$JS.API." or that of a domain
	inbox    string
	level    int // JetStream API level of the server at the time of connecting
	attempt  time.Duration
	patience time.Duration // 0: no bound
	hooks    ConnHooks

	mu        sync.Mutex
	waiting   map[*waiter]struct{} // attempts under way
	lost      chan struct{}        // closed when the connection is lost
	noInbox   error                // why no reply can arrive, if the server refused our inbox
	noAnswers bool                 // the server refused an AnswerSubject: answers go to inboxes

	settling  sync.Mutex
	nextRound chan struct{} // closed when the next round of settle is done; nil: no call waits for one
	inRound   bool          // settleRounds runs
}

// waiter is an attempt under way: a loss of the connection or a refusal of its subject ends it before its time.
type waiter struct {
	subject string // exact, or a prefix that ends in '.'
	cancel  context.CancelCauseFunc
}

// Connect connects and makes sure that there is a JetStream.
//
// Errors wrap [ErrUnavailable] (nobody there; see [ConnOptions.Wait]), with it [ErrNoLeader] (a server, but no
// JetStream for now), [ErrDenied] (credentials refused) or [ErrNoJetStream]; those of options that make no sense wrap
// nothing. None shows a password.
func Connect(ctx context.Context, o ConnOptions) (*Conn, error) {
	if len(o.URLs) == 0 {
		o.URLs = []string{nats.DefaultURL}
	}
	o.Name = cmp.Or(o.Name, "kvatlas")
	o.InboxPrefix = cmp.Or(o.InboxPrefix, "_INBOX")
	o.ConnectTimeout = cmp.Or(max(o.ConnectTimeout, 0), 3*time.Second)
	o.AttemptTimeout = cmp.Or(max(o.AttemptTimeout, 0), 2*time.Second)
	hooks.Fill(&o.Hooks)
	if (o.CertFile == "") != (o.KeyFile == "") {
		return nil, fmt.Errorf("connect: a TLS certificate and its key belong together, have certificate %q and key %q",
			o.CertFile, o.KeyFile)
	}
	c := &Conn{
		api:      jetstream.DefaultAPIPrefix,
		inbox:    o.InboxPrefix,
		attempt:  o.AttemptTimeout,
		patience: o.Patience,
		hooks:    o.Hooks,
		waiting:  make(map[*waiter]struct{}),
		lost:     make(chan struct{}),
	}
	opts, err := c.natsOptions(o)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	action := "connect to the embedded server"
	if o.Server == nil {
		action = "connect to " + ShownAddress(strings.Join(o.URLs, ","))
		for _, a := range o.URLs {
			if err := CheckAddress(a); err != nil {
				return nil, fmt.Errorf("connect: %w", err)
			}
		}
	}
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		c.nc, err = nats.Connect(strings.Join(o.URLs, ","), opts...)
		if err == nil {
			break
		}
		if fatal := connectRefused(err); fatal || !o.Wait {
			if !fatal && classOf(err) == nil {
				return nil, fmt.Errorf("%s: %w: %w", action, ErrUnavailable, err)
			}
			return nil, failed(action, err)
		}
		c.hooks.Waiting(err)
		if !loop.Wait(ctx, pause) {
			return nil, fmt.Errorf("%s: %w: %w", action, ErrUnavailable, err)
		}
	}
	if o.Domain != "" {
		c.api = "$JS." + o.Domain + ".API."
	}
	if o.Core {
		return c, nil
	}
	c.level, err = c.apiLevel(ctx)
	if err != nil {
		c.nc.Close()
		return nil, failed(action, err)
	}
	return c, nil
}

// pingInterval is how often a server that says nothing is asked whether it lives. One that stands still, or whose cable
// is cut, is left for another after two to three of them.
const pingInterval = 3 * time.Second

func (c *Conn) natsOptions(o ConnOptions) ([]nats.Option, error) {
	opts := []nats.Option{
		nats.Name(o.Name),
		nats.MaxReconnects(-1),
		nats.IgnoreAuthErrorAbort(), // credentials may be replaced while we wait
		nats.ReconnectWait(250 * time.Millisecond),
		nats.ReconnectJitter(100*time.Millisecond, 250*time.Millisecond),
		nats.PingInterval(pingInterval),
		nats.MaxPingsOutstanding(2),
		nats.ReconnectBufSize(-1), // nothing is kept back to be sent later, of a fate unknown
		nats.Timeout(o.ConnectTimeout),
		nats.CustomInboxPrefix(o.InboxPrefix),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) { c.disconnected(err) }),
		nats.ReconnectHandler(func(nc *nats.Conn) { c.hooks.Reconnected(ShownAddress(nc.ConnectedUrl())) }),
		nats.ErrorHandler(func(_ *nats.Conn, s *nats.Subscription, err error) { c.asyncError(s, err) }),
	}
	for _, given := range []struct {
		is     bool
		option nats.Option
	}{
		{o.Server != nil, nats.InProcessServer(o.Server)},
		{o.CredsFile != "", nats.UserCredentials(o.CredsFile)},
		{o.User != "", nats.UserInfo(o.User, o.Password)},
		{o.Token != "", nats.Token(o.Token)},
		{o.CAFile != "", nats.RootCAs(o.CAFile)},
		{o.CertFile != "", nats.ClientCert(o.CertFile, o.KeyFile)},
	} {
		if given.is {
			opts = append(opts, given.option)
		}
	}
	if o.NkeyFile != "" {
		nkey, err := nkeyOption(o.NkeyFile)
		if err != nil {
			return nil, fmt.Errorf("nkey file %s: %w", o.NkeyFile, err)
		}
		opts = append(opts, nkey)
	}
	return opts, nil
}

// connectRefused reports whether an error of connecting is an answer, which trying again will not change.
func connectRefused(err error) bool {
	_, cert := errors.AsType[*tls.CertificateVerificationError](err)
	return classOf(err) == ErrDenied || cert ||
		errors.Is(err, nats.ErrSecureConnRequired) || errors.Is(err, nats.ErrSecureConnWanted) ||
		errors.Is(err, nats.ErrNkeysNotSupported) || errors.Is(err, nats.ErrInvalidArg)
}

func (c *Conn) apiLevel(ctx context.Context) (int, error) {
	var info struct {
		API struct {
			Level int `json:"level"`
		} `json:"api"`
	}
	var err error
	asked := c.retry(ctx, func() error {
		err = c.callOnce(ctx, "INFO", nil, &info)
		switch {
		case errors.Is(err, nats.ErrNoResponders):
			err = fmt.Errorf("%w on NATS server %s", ErrNoJetStream, c.nc.ConnectedServerName())
		case classOf(err) == ErrUnavailable && !errors.Is(err, context.Canceled) && c.nc.IsConnected():
			err = fmt.Errorf("NATS server %s answers, but %w: %w", c.nc.ConnectedServerName(), ErrNoLeader, err)
		}
		if classOf(err) == ErrUnavailable {
			c.hooks.Waiting(err)
		}
		return err
	})
	if asked != nil {
		return 0, asked
	}
	return info.API.Level, nil
}

// Close ends the connection at once.
func (c *Conn) Close() { c.nc.Close() }

// CloseWhenAway closes the connection once the server has not answered for patience, and reports whether it did; it
// returns false when ctx ends before. Whoever waits for the server gets an error then. It is for processes that stop.
func (c *Conn) CloseWhenAway(ctx context.Context, patience time.Duration) bool {
	for answered := time.Now(); ; {
		asking, cancel := context.WithDeadline(ctx, answered.Add(patience))
		err := c.flush(asking)
		cancel()
		switch {
		case err == nil:
			answered = time.Now()
		case time.Since(answered) >= patience && ctx.Err() == nil:
			c.Close()
			return true
		}
		if !loop.Wait(ctx, 100*time.Millisecond) {
			return false
		}
	}
}

// Closed reports whether the connection was closed for good.
func (c *Conn) Closed() bool { return c.nc.IsClosed() }

// NATS is the connection itself, for those who ask services over it (pkg/client, pkg/rpc).
func (c *Conn) NATS() *nats.Conn { return c.nc }

// Connected reports whether there is a connection at this moment.
func (c *Conn) Connected() bool { return c.nc.IsConnected() }

// ServerURL is the server to which the connection goes now, or went last, without credentials.
func (c *Conn) ServerURL() string { return ShownAddress(c.nc.ConnectedUrl()) }

// atomicBatches reports whether the server knows atomic batches (nats-server 2.12, API level 2).
func (c *Conn) atomicBatches() bool { return c.level >= BatchLevel }

func (c *Conn) disconnected(err error) {
	c.mu.Lock()
	c.noInbox, c.noAnswers = nil, false
	close(c.lost)
	c.lost = make(chan struct{})
	for w := range c.waiting {
		w.cancel(errDisconnected)
	}
	c.mu.Unlock()
	if !c.nc.IsClosed() {
		c.hooks.Disconnected(err)
	}
}

// untilLost is closed when the connection that is there now is lost, or the next one if there is none.
func (c *Conn) untilLost() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lost
}

// asyncError passes on what no call can return. A refused subject reaches the client in this way alone, while
// the call waits for an answer that will not come: the call is found by its subject and ended.
func (c *Conn) asyncError(sub *nats.Subscription, err error) {
	if errors.Is(err, nats.ErrPermissionViolation) {
		if kind, subject, ok := RefusedSubject(err.Error()); ok {
			c.mu.Lock()
			if kind == "Subscription" && strings.HasPrefix(subject, c.inbox+".") {
				c.noInbox = err
			}
			c.noAnswers = c.noAnswers || kind == "Publish" && isAnswerSubject(subject)
			for w := range c.waiting {
				if c.noInbox != nil || kind == "Publish" && (w.subject == subject ||
					strings.HasSuffix(w.subject, ".") && strings.HasPrefix(subject, w.subject)) {
					w.cancel(err)
				}
			}
			c.mu.Unlock()
			if kind == "Publish" && subject == userInfo {
				return // a user without this permission needs no model claims
			}
		}
	}
	if sub != nil {
		err = fmt.Errorf("subscription %s: %w", sub.Subject, err)
	}
	c.hooks.AsyncError(err)
}

// answersDirectly reports whether the server refuses an [AnswerSubject], as one does whose permissions are of a version
// before there were any. Shims and nodes are in one account then.
func (c *Conn) answersDirectly() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.noAnswers
}

// RefusedSubject reads `… Permissions Violation for Publish to "subject"` (nats-server server/client.go): the kind is
// "Publish" or "Subscription". It reports false for any other text.
func RefusedSubject(text string) (kind, subject string, ok bool) {
	_, rest, ok := strings.Cut(text, "ermissions Violation for ")
	kind, rest, found := strings.Cut(rest, " to \"")
	subject, _, ended := strings.Cut(rest, "\"")
	return kind, subject, ok && found && ended
}

// try is [Conn.tryFor] the usual time.
func (c *Conn) try(ctx context.Context, subject string, do func(context.Context) error) error {
	return c.tryFor(ctx, c.attempt, subject, do)
}

// tryFor runs one attempt: do gets a context that ends after the attempt's time, or with the connection, or
// when the server refuses the subject (exact, or a prefix that ends in '.'). An error of do that comes from
// that context is replaced by its cause, and nats.go's words for a connection that is away by ours.
func (c *Conn) tryFor(ctx context.Context, d time.Duration, subject string, do func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ctx, stop := context.WithTimeoutCause(ctx, d, errAttemptOver)
	defer stop()
	w := &waiter{subject: subject, cancel: cancel}
	c.mu.Lock()
	refused := c.noInbox
	c.waiting[w] = struct{}{}
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.waiting, w)
		c.mu.Unlock()
	}()
	if refused != nil {
		return refused
	}
	err := sent(do(ctx))
	if err != nil && ctx.Err() != nil && (errors.Is(err, context.Canceled) ||
		errors.Is(err, context.DeadlineExceeded) || errors.Is(err, nats.ErrTimeout)) {
		return context.Cause(ctx)
	}
	return err
}

// request sends one message and waits for one answer, once.
func (c *Conn) request(ctx context.Context, m *nats.Msg) (reply *nats.Msg, err error) {
	err = c.try(ctx, m.Subject, func(ctx context.Context) (err error) {
		reply, err = c.nc.RequestMsgWithContext(ctx, m)
		return err
	})
	return reply, err
}

// retry repeats an attempt while waiting may help: API requests are not answered while a cluster has no leader.
// It returns the last error when the context ends, or the connection's patience.
func (c *Conn) retry(ctx context.Context, attempt func() error) error {
	begun := time.Now()
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		err := attempt()
		if err == nil || classOf(err) != ErrUnavailable || c.nc.IsClosed() || c.patience > 0 &&
			time.Since(begun) >= c.patience {
			return err
		}
		if !loop.Wait(ctx, pause) {
			return err
		}
	}
}

// call asks the JetStream API, again and again until there is an answer or the context ends.
func (c *Conn) call(ctx context.Context, action, verb string, args, answer any) error {
	return failed(action, c.retry(ctx, func() error { return c.callOnce(ctx, verb, args, answer) }))
}

// callOnce asks the JetStream API once. The error is that of the server or of the connection, without an action.
func (c *Conn) callOnce(ctx context.Context, verb string, args, answer any) error {
	m := &nats.Msg{Subject: c.api + verb}
	if args != nil {
		var err error
		if m.Data, err = json.Marshal(args); err != nil {
			return err
		}
	}
	reply, err := c.request(ctx, m)
	if err != nil {
		return err
	}
	var head struct {
		Error *apiError `json:"error"`
	}
	if err := json.Unmarshal(reply.Data, &head); err != nil {
		return fmt.Errorf("answer of the JetStream API: %w", err)
	}
	if head.Error != nil {
		return head.Error
	}
	if answer == nil {
		return nil
	}
	if err := json.Unmarshal(reply.Data, answer); err != nil {
		return fmt.Errorf("answer of the JetStream API: %w", err)
	}
	return nil
}
