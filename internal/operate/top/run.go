package top

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/gdamore/tcell/v2"

	"github.com/kvatlas/kvatlas/internal/base/loop"
)

// LookFunc returns the current state of the fleet. Run calls it from one goroutine.
type LookFunc func(context.Context) (*Look, error)

// Run shows a view on a screen until the reader quits or ctx ends. It refreshes the view each interval. It displays the
// error of a failed look and tries again.
func Run(ctx context.Context, s tcell.Screen, v *View, look LookFunc, interval time.Duration) error {
	tcell.SetEncodingFallback(tcell.EncodingFallbackASCII)
	if err := s.Init(); err != nil {
		return fmt.Errorf("draw on the terminal: %w", err)
	}
	s.RegisterRuneFallback('…', ".")
	ctx, cancel := context.WithCancel(ctx)
	var looking sync.WaitGroup
	defer looking.Wait()
	defer cancel()
	defer s.Fini()

	looks := make(chan func())
	looking.Go(func() {
		for {
			l, err := look(ctx)
			at := time.Now()
			known := func() { v.Learn(l) }
			if err != nil {
				known = func() { v.Fail(err, at) }
			}
			select {
			case looks <- known:
			case <-ctx.Done():
				return
			}
			if !loop.Wait(ctx, interval) {
				return
			}
		}
	})
	pressed, quit := make(chan tcell.Event), make(chan struct{})
	defer close(quit)
	go s.ChannelEvents(pressed, quit)
	for {
		draw(s, v)
		select {
		case <-ctx.Done():
			return nil
		case known := <-looks:
			known()
		case e, more := <-pressed:
			if !more {
				return nil
			}
			switch e := e.(type) {
			case *tcell.EventKey:
				if v.Press(e) {
					return nil
				}
				if e.Key() == tcell.KeyCtrlL {
					s.Sync()
				}
			case *tcell.EventResize:
				s.Sync()
			case *tcell.EventError:
				return fmt.Errorf("read the terminal: %w", e)
			}
		}
	}
}

// draw writes a frame to the screen.
func draw(s tcell.Screen, v *View) {
	s.Clear()
	for y, l := range v.Frame(s.Size()) {
		x := 0
		for _, span := range l.Spans {
			style := styles[span.Style].Reverse(l.Reverse)
			for text, n := span.Text, 0; text != ""; x += n {
				if text, n = s.Put(x, y, text, style); n == 0 {
					break // the rest is off the screen
				}
			}
		}
	}
	s.Show()
}

var styles = [...]tcell.Style{
	Plain:   tcell.StyleDefault,
	Bold:    tcell.StyleDefault.Bold(true),
	Dim:     tcell.StyleDefault.Dim(true),
	Warning: tcell.StyleDefault.Foreground(tcell.ColorOlive),
	Bad:     tcell.StyleDefault.Foreground(tcell.ColorRed).Bold(true),
}

// Once looks twice, an interval apart, so that the view has rates.
func Once(ctx context.Context, v *View, look LookFunc, interval time.Duration) error {
	for i := range 2 {
		if i > 0 && !loop.Wait(ctx, interval) {
			return ctx.Err()
		}
		l, err := look(ctx)
		if err != nil {
			return err
		}
		v.Learn(l)
	}
	return nil
}
