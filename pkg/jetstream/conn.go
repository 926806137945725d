package jetstream

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/base/natsurl"
)

// ConnOptions configure a connection: servers, credentials, and the behaviour without a server. The zero value of each
// field is a good default. Callers read NATS_URL and other variables of the environment.
type ConnOptions struct {
	URLs []string // servers; default nats://127.0.0.1:4222. "tls://" requires TLS

	// Server is a NATS server in this process. If set, URLs and TLS are ignored.
	Server nats.InProcessConnProvider

	Name string // name in the server's list of connections; default "kvatlas"

	// Credentials. Empty fields are not sent. At most one kind should be set.
	CredsFile string // JWT and seed, in the form of nsc
	NkeyFile  string // file with an nkey seed
	User      string
	Password  string
	Token     string

	// TLS files. CAFile alone verifies the server. CertFile and KeyFile together identify the client.
	CAFile   string
	CertFile string
	KeyFile  string

	// InboxPrefix is the first part of all reply subjects of this client; default "_INBOX". A separate prefix with
	// matching permissions keeps users from reading each other's replies.
	InboxPrefix string

	// Domain is the JetStream domain if JetStream is behind a leaf node.
	Domain string

	// Core connects without JetStream. Such a connection supports [Conn.Listen], [Conn.Request], and clients of
	// services ([Conn.NATS]).
	Core bool

	// Wait selects the behaviour of Connect if no server is reachable: false returns the error at once, true retries
	// until the context ends. A refusal (credentials, TLS) is always returned at once. Connect waits for a JetStream
	// without a leader in both cases.
	Wait bool

	ConnectTimeout time.Duration // for one attempt to connect; default 3 s
	AttemptTimeout time.Duration // time of one request to the JetStream API before it is repeated; default 2 s

	resolver *net.Resolver // of the servers' names; nil is [net.DefaultResolver]

	// Patience is the longest time to repeat a call while JetStream is unavailable. The call then returns that error.
	// Default: until the context ends.
	Patience time.Duration

	// The functions below may be nil. One goroutine of the connection calls them, one at a time; they must return soon.

	Disconnected func(err error)  // the connection is lost; reconnects never stop
	Reconnected  func(url string) // a connection exists again
	AsyncError   func(err error)  // an error that no call can return: a refused subject, a slow consumer
	Waiting      func(err error)  // Connect retries: no server, or no JetStream (ErrNoLeader)
}

// Conn is a connection to NATS that reconnects for ever. Its methods may be called from any goroutine.
type Conn struct {
	nc       *nats.Conn
	api      string // "$JS.API." or the prefix of a domain
	inbox    string
	level    int // JetStream API level of the server at the time of Connect
	attempt  time.Duration
	patience time.Duration // 0: no bound
	options  ConnOptions

	mu        sync.Mutex
	waiting   map[*waiter]struct{} // attempts under way
	lost      chan struct{}        // closed when the connection is lost
	noInbox   error                // set if the server refused the inbox, so that no reply can arrive
	noAnswers bool                 // the server refused a [Names.Answer]: answers go to inboxes

	settling  sync.Mutex
	nextRound chan struct{} // closed at the end of the next round of settle; nil: no call waits
	inRound   bool          // settleRounds is running
}

// waiter is an attempt under way. A loss of the connection, or a refusal of its subject, cancels it.
type waiter struct {
	subject string // exact, or a prefix that ends in '.'
	cancel  context.CancelCauseFunc
}

// Connect connects to a server and checks that JetStream is available.
//
// Errors wrap [ErrUnavailable] (no server; see [ConnOptions.Wait]), with it [ErrNoLeader] (a server without JetStream
// for now), [ErrDenied] (refused credentials) or [ErrNoJetStream]. Errors of invalid options wrap none of them. No
// error contains a password.
func Connect(ctx context.Context, o ConnOptions) (*Conn, error) {
	if len(o.URLs) == 0 {
		o.URLs = []string{nats.DefaultURL}
	}
	o.Name = cmp.Or(o.Name, "kvatlas")
	o.InboxPrefix = cmp.Or(o.InboxPrefix, "_INBOX")
	o.ConnectTimeout = cmp.Or(max(o.ConnectTimeout, 0), 3*time.Second)
	o.AttemptTimeout = cmp.Or(max(o.AttemptTimeout, 0), 2*time.Second)
	for _, f := range []*func(error){&o.Disconnected, &o.AsyncError, &o.Waiting} {
		if *f == nil {
			*f = func(error) {}
		}
	}
	if o.Reconnected == nil {
		o.Reconnected = func(string) {}
	}
	if (o.CertFile == "") != (o.KeyFile == "") {
		return nil, fmt.Errorf("connect: a TLS certificate and its key belong together, have certificate %q and key %q",
			o.CertFile, o.KeyFile)
	}
	c := &Conn{
		api:      jetstream.DefaultAPIPrefix,
		inbox:    o.InboxPrefix,
		attempt:  o.AttemptTimeout,
		patience: o.Patience,
		options:  o,
		waiting:  make(map[*waiter]struct{}),
		lost:     make(chan struct{}),
	}
	opts, err := c.natsOptions(o)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	action := "connect to the embedded server"
	if o.Server == nil {
		action = "connect to " + natsurl.Shown(strings.Join(o.URLs, ","))
		for _, a := range o.URLs {
			if err := natsurl.Check(a); err != nil {
				return nil, fmt.Errorf("connect: %w", err)
			}
		}
	}
	for retry := (loop.Backoff{Min: 50 * time.Millisecond, Max: 2 * time.Second}); ; {
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
		c.options.Waiting(err)
		if !retry.Wait(ctx) {
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

// pingInterval is the time between pings of a silent server. A server that hangs, or behind a broken network, is
// replaced after two to three pings.
const pingInterval = 3 * time.Second

func (c *Conn) natsOptions(o ConnOptions) ([]nats.Option, error) {
	opts := []nats.Option{
		nats.Name(o.Name),
		nats.MaxReconnects(-1),
		nats.IgnoreAuthErrorAbort(), // credentials may change while the client waits
		nats.ReconnectWait(250 * time.Millisecond),
		nats.ReconnectJitter(100*time.Millisecond, 250*time.Millisecond),
		nats.PingInterval(pingInterval),
		nats.MaxPingsOutstanding(2),
		nats.ReconnectBufSize(-1), // no buffer: a message sent later would have an unknown result
		nats.Timeout(o.ConnectTimeout),
		nats.SetCustomDialer(dialer{o.ConnectTimeout, o.resolver}), nats.SkipHostLookup(),
		nats.CustomInboxPrefix(o.InboxPrefix),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) { c.disconnected(err) }),
		nats.ReconnectHandler(func(nc *nats.Conn) { c.options.Reconnected(natsurl.Shown(nc.ConnectedUrl())) }),
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

// connectRefused reports whether a retry cannot change an error of a connect.
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
			c.options.Waiting(err)
		}
		return err
	})
	if asked != nil {
		return 0, asked
	}
	return info.API.Level, nil
}

// Close closes the connection at once.
func (c *Conn) Close() { c.nc.Close() }

// CloseWhenAway closes the connection after patience without an answer of the server, and returns true. Calls that wait
// for the server then return an error. CloseWhenAway returns false if ctx ends before. Use it in processes that stop.
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

// Closed reports whether the connection is closed for good.
func (c *Conn) Closed() bool { return c.nc.IsClosed() }

// NATS returns the connection itself, for clients of services (pkg/client, internal/base/rpc).
func (c *Conn) NATS() *nats.Conn { return c.nc }

// Connected reports whether there is a connection at present.
func (c *Conn) Connected() bool { return c.nc.IsConnected() }

// ServerURL returns the present or last server without credentials.
func (c *Conn) ServerURL() string { return natsurl.Shown(c.nc.ConnectedUrl()) }

// atomicBatches reports whether the server supports atomic batches (nats-server 2.12, API level 2).
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
		c.options.Disconnected(err)
	}
}

// untilLost returns a channel that is closed at the loss of the present connection, or of the next one if there is
// none.
func (c *Conn) untilLost() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lost
}

// asyncError handles errors that no call can return, such as the refusal of a subject. The call with this subject waits
// for an answer that will not arrive. asyncError finds the call by the subject and cancels the wait.
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
	c.options.AsyncError(err)
}

// answersDirectly reports whether the server refuses a [Names.Answer], like a server with the permissions of an older
// version. Shims and nodes are then in one account.
func (c *Conn) answersDirectly() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.noAnswers
}

// RefusedSubject parses `… Permissions Violation for Publish to "subject"` (nats-server server/client.go). The kind is
// "Publish" or "Subscription". It returns false for other texts.
func RefusedSubject(text string) (kind, subject string, ok bool) {
	_, rest, ok := strings.Cut(text, "ermissions Violation for ")
	kind, rest, found := strings.Cut(rest, " to \"")
	subject, _, ended := strings.Cut(rest, "\"")
	return kind, subject, ok && found && ended
}

// attemptOnce is [Conn.tryFor] with the usual time.
func (c *Conn) attemptOnce(ctx context.Context, subject string, do func(context.Context) error) error {
	return c.tryFor(ctx, c.attempt, subject, do)
}

// tryFor runs one attempt. The context of do ends after the time d, with the connection, or when the server refuses the
// subject (exact, or a prefix with '.' at the end). tryFor replaces an error of this context by the cause, and
// nats.go's text for a missing connection by our own.
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

// request sends one message once and waits for one answer.
func (c *Conn) request(ctx context.Context, m *nats.Msg) (reply *nats.Msg, err error) {
	err = c.attemptOnce(ctx, m.Subject, func(ctx context.Context) (err error) {
		reply, err = c.nc.RequestMsgWithContext(ctx, m)
		return err
	})
	return reply, err
}

// newBackoff returns the pauses between attempts of a request to the server.
func newBackoff() loop.Backoff { return loop.Backoff{Min: 20 * time.Millisecond, Max: time.Second} }

// retry repeats an attempt while the error is temporary: a cluster without a leader does not answer API requests. It
// returns the last error when the context ends, or after the connection's patience.
func (c *Conn) retry(ctx context.Context, attempt func() error) error {
	begun := time.Now()
	for retry := newBackoff(); ; {
		err := attempt()
		if err == nil || classOf(err) != ErrUnavailable || c.nc.IsClosed() || c.patience > 0 &&
			time.Since(begun) >= c.patience {
			return err
		}
		if !retry.Wait(ctx) {
			return err
		}
	}
}

// call sends a request to the JetStream API, and repeats it until an answer arrives or the context ends.
func (c *Conn) call(ctx context.Context, action, verb string, args, answer any) error {
	return failed(action, c.retry(ctx, func() error { return c.callOnce(ctx, verb, args, answer) }))
}

// callOnce sends a request to the JetStream API once. The error is from the server or the connection, without an
// action.
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
