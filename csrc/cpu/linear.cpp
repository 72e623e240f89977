// out = x @ weight.T + bias with weights packed once, made for decode: at one row the weights stream through
// once at memory speed, at many rows every panel is read once per block of rows.
//
// The rule this file keeps (batch invariance): an output element is the sum over k in ascending order into one
// accumulator, in registers from the first k to the last. How many rows there are, which tile a row falls into and who
// computes it decide only which other elements sit in neighbouring registers. linear_tiles.h has the tiles on vectors,
// linear_amx.h and linear_mmla.h those on matrix instructions, linear_pack.cpp makes the panels, linear_driver.h cuts the
// work into tiles and finishes the sums.
//
// Layout: panels of 32 output features. A step of K is one line of 32 floats, or of 32 pairs (k, k+1), which is at once
// an operand of a dot product and a row of an AMX B tile. Rows of x are prepared tile by tile into one stream.
#include "cpu/kernels.h"
#include "cpu/linear_driver.h"
#include "cpu/linear_tiles.h"

#if defined(__AMX_BF16__) || defined(PAGEMILL_AMX_EMULATED)
#define PAGEMILL_LINEAR_AMX
#include "cpu/linear_amx.h"
#elif defined(PAGEMILL_NEON) && defined(PAGEMILL_BF16_DOT)
#define PAGEMILL_LINEAR_MMLA
#include "cpu/linear_mmla.h"
#endif

namespace pagemill::PAGEMILL_LEVEL {
namespace {

template <class Tiles>
void run_bfloat16(const LinearArgs& a, int64_t* next) {
  Worker<Tiles> worker(a);
  if (a.out_bf16) {
    worker.template run<uint16_t>(next);
  } else {
    worker.template run<float>(next);
  }
}

}  // namespace

void linear(const LinearArgs& a, int64_t* next) {
  if (!a.bf16) return Worker<VectorTiles<Float32Products>>(a).run<float>(next);
#if defined(PAGEMILL_LINEAR_AMX)
  AmxTiles::configure();
  run_bfloat16<AmxTiles>(a, next);
  TILE_RELEASE();
#elif defined(PAGEMILL_LINEAR_MMLA)
  run_bfloat16<MatrixTiles>(a, next);
#else
  run_bfloat16<VectorTiles<Bfloat16Products>>(a, next);
#endif
}

}  // namespace pagemill::PAGEMILL_LEVEL
