package server

import (
	"context"
	"errors"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/faces/compat"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// serveDynamo serves requests to Dynamo's router over the request plane, on a subject of kvatlas for every model.
func (v *service) serveDynamo() error {
	plane := &compat.Plane{Router: v.s, BlockSize: v.s.blockSize, Resolve: v.s.registry.Resolve}
	cfg := v.config("kvatlas-dynamo", api.OverNATS)
	if q := v.s.Routing.Queue; q != nil {
		cfg.Workers += q.Most() // waiting requests must not use up the workers of the requests that they wait for
	}
	var errs []error
	for verb, answer := range map[string]func(context.Context, string, jetstream.Request) ([]byte, *api.Error){
		"generate": func(ctx context.Context, model string, r jetstream.Request) ([]byte, *api.Error) {
			return plane.Answer(ctx, model, r.ID, r.Body)
		},
		"select": func(ctx context.Context, model string, r jetstream.Request) ([]byte, *api.Error) {
			return plane.Select(ctx, model, r.Body)
		},
	} {
		op := "dynamo_" + verb
		subject, err := jetstream.Names(v.s.Namespace).Dynamo("*", verb)
		errs = append(errs, err)
		cfg.Endpoints = append(cfg.Endpoints, jetstream.Endpoint{Name: op, Subject: subject, QueueGroup: queueGroup,
			Handler: func(ctx context.Context, r jetstream.Request) jetstream.Response {
				begun := time.Now()
				model, named := jetstream.Names(v.s.Namespace).ParseDynamo(r.Subject)
				form, known := api.ContentType(r.ContentType)
				var failure *api.Error
				var reply []byte
				switch {
				case !known || form != api.JSON:
					failure = api.Errorf(api.CodeWrongContentType, "Content-Type is %.40q; this subject requires %s", r.ContentType,
						api.JSON)
				case !named:
					failure = api.Errorf(api.CodeUnknownModel, "the subject %.200s names no model", r.Subject)
				default:
					reply, failure = answer(ctx, model, r)
				}
				out := jetstream.Response{ContentType: api.JSON, Body: reply, Outcome: ops.OK}
				if failure != nil {
					out = failed(api.JSON, failure)
				}
				v.s.queries.Observe(op, out.Outcome, time.Since(begun))
				return out
			}})
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	service, err := jetstream.Serve(v.s.Conn, cfg)
	if err == nil {
		v.shared = append(v.shared, service)
	}
	return err
}

// blockSize returns the block size of a model's workers, or 0 without workers and with several block sizes.
func (s *Server) blockSize(model string) (size uint32) {
	for _, r := range s.registry.Pool(model).Ranks {
		if size != 0 && r.BlockSize != size {
			return 0
		}
		size = r.BlockSize
	}
	return size
}
