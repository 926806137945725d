#include "textflag.h"

// func prefetchHomes(slots *uint64, buckets uint64, hashes *uint64, n int)
TEXT ·prefetchHomes(SB), NOSPLIT, $0-32
	MOVQ slots+0(FP), DI
	MOVQ buckets+8(FP), SI
	MOVQ hashes+16(FP), DX
	MOVQ n+24(FP), CX

loop:
	TESTQ CX, CX
	JLE   done
	MOVQ  (DX), AX
	IMULQ SI, AX
	SHRQ  $32, AX
	SHLQ  $6, AX
	PREFETCHT0 (DI)(AX*1)
	ADDQ  $8, DX
	DECQ  CX
	JMP   loop

done:
	RET

// func prefetchWords(p *uint64, n int)
TEXT ·prefetchWords(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), DI
	MOVQ n+8(FP), CX

lines:
	PREFETCHT0 (DI)
	ADDQ $64, DI
	SUBQ $8, CX
	JGT  lines
	RET
