#include "textflag.h"

// AHEAD is the prefetch distance before the comparison, in bytes, for both sides. It is enough to pass a page, where the
// prefetcher of the processor stops. A prefetch beyond the end of a run is useless, so it is no larger.
#define AHEAD 256

// func sameRunSSE(a, b []uint64) int
TEXT ·sameRunSSE(SB), NOSPLIT, $0-56
	MOVQ a_base+0(FP), SI
	MOVQ b_base+24(FP), DI
	MOVQ b_len+32(FP), CX
	XORQ AX, AX
	MOVQ CX, DX
	ANDQ $~7, DX

eights:
	CMPQ AX, DX
	JGE  ones
	PREFETCHT0 AHEAD(SI)(AX*8)
	PREFETCHT0 AHEAD(DI)(AX*8)
	MOVOU (SI)(AX*8), X0
	MOVOU 16(SI)(AX*8), X1
	MOVOU 32(SI)(AX*8), X2
	MOVOU 48(SI)(AX*8), X3
	MOVOU (DI)(AX*8), X4
	MOVOU 16(DI)(AX*8), X5
	MOVOU 32(DI)(AX*8), X6
	MOVOU 48(DI)(AX*8), X7
	PCMPEQB X4, X0
	PCMPEQB X5, X1
	PCMPEQB X6, X2
	PCMPEQB X7, X3
	PAND X1, X0
	PAND X3, X2
	PAND X2, X0
	PMOVMSKB X0, R8
	CMPL R8, $0xffff
	JNE  ones
	ADDQ $8, AX
	JMP  eights

ones:
	CMPQ AX, CX
	JGE  done
	MOVQ (SI)(AX*8), R8
	CMPQ R8, (DI)(AX*8)
	JNE  done
	INCQ AX
	JMP  ones

done:
	MOVQ AX, ret+48(FP)
	RET
